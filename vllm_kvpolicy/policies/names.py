"""Names of policies: the grammar, and what a name says about its policy.

A name is `[ADMISSION][+EVICTION][+SELECTION]`, at least one part; EVICTION is
`[ALLOCATOR-]SCORER`. For example `wgkv+ams-snapkv+quest` has all four words.

Each file in the folder of a kind defines one word. A user's own scorer or allocator is
a word, too: the name of an entry point of the group `vllm_kvpolicy.policies`, or
`package.module:Class` in its place, such as `ams-my.scorers:Novelty`. What a name does
not have is not imported.
"""

import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from pydantic.fields import FieldInfo

from vllm_kvpolicy.config_keys import SERVER_OPTIONS, nearest, shown

Word = Any
"""A subclass of `policies.words.Word`, which imports torch."""
RESERVED = {"exact", "ragged", *SERVER_OPTIONS}
"""Names of options that every policy reads alike, or that are the server's."""
GROUP = "vllm_kvpolicy.policies"
"""Of the entry points that name users' own scorers and allocators."""
_ROOM = "vllm_kvpolicy.policies"
_MEANING = ("annotation", "metadata", "default", "default_factory")  # of an option
_PATH = re.compile(r"(?!\d)\w+(\.(?!\d)\w+)*:(?!\d)\w+")  # "package.module:Class"


class Words(Mapping[str, Any]):
    """The words of one kind, by name; a class is imported when it is looked up.

    Iterating lists the words of this package alone, and imports none.

    Args:
        folder: a file of it is a word; one with a leading underscore is not.
        base: what users' own words are subclasses of; "" where there are none.
        unnamed: file of the empty word.
    """

    def __init__(self, folder: str, base: str = "", unnamed: str = "") -> None:
        self.folder, self.base, self.unnamed = folder, base, unnamed

    @cached_property
    def _files(self) -> dict[str, str]:
        """The module of each word."""
        folders = import_module(f"{_ROOM}.{self.folder}").__path__
        found = {"": self.unnamed} if self.unnamed else {}
        for module in sorted(pkgutil.iter_modules(folders), key=lambda each: each.name):
            if not module.name.startswith("_"):
                inside = ".policy" if module.ispkg else ""
                found[module.name] = f"{module.name}{inside}"
        return {word: f"{_ROOM}.{self.folder}.{name}" for word, name in found.items()}

    def __getitem__(self, word: str) -> Word:
        """Return the class of a word of this package."""
        return _defined_in(self._files[word])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, word: object) -> bool:
        """Return whether a word is one of this package; imports nothing."""
        return word in self._files

    def find(self, word: str) -> Word:
        """Return the class of a word, a user's own included; None for an unknown one.

        Raises:
            ValueError: a user's own word that cannot be used.
        """
        if word in self or not self.base:
            return self.get(word)
        if not _PATH.fullmatch(str(word)) and word not in installed():
            return None
        base = getattr(import_module(f"{_ROOM}.words"), self.base)
        return _own(word, base)


SCORERS = Words("scorers", "BaseScorer")
# The empty word is the allocator of a name without one.
ALLOCATORS = Words("allocators", "BaseAllocator", unnamed="_uniform")
ADMISSIONS = Words("admissions")
SELECTIONS = Words("selections")
# Policies that are not composed, by name: "module:class".
TESTS = {"identity": "testing:Identity", "holes": "testing:Holes"}
KEEP_ALL = "compose:KeepAll"
# Admissions with models of their own -> classes in their `checkpoint` that vLLM must
# know to load these. Their `model` is asked at every start, with a policy or without.
OWN_MODELS = {"dms": ("LlamaForCausalLMDMS", "Qwen3ForCausalLMDMS")}


@cache
def _defined_in(module_name: str) -> Word:
    """Return the word that a file defines: its class that has a summary."""
    members = vars(import_module(module_name)).values()
    (word,) = (
        each
        for each in members
        if getattr(each, "__module__", None) == module_name and "summary" in vars(each)
    )
    return word


def _load(path: str) -> Word:
    module, _, name = path.partition(":")
    return getattr(import_module(f"{_ROOM}.{module}"), name)


def models_of(admission: str) -> ModuleType:
    """Return what an admission of `OWN_MODELS` says about models."""
    return import_module(f"{_ROOM}.{ADMISSIONS.folder}.{admission}.model")


def architectures() -> dict[str, str]:
    """Return "module:class" of the models of `OWN_MODELS`, by their architecture."""
    return {
        name: f"{_ROOM}.{ADMISSIONS.folder}.{admission}.checkpoint:{name}"
        for admission, found in OWN_MODELS.items()
        for name in found
    }


@cache
def installed() -> Mapping[str, EntryPoint]:
    """Return users' own words by name, not imported; ValueError for a wrong name."""
    found: dict[str, EntryPoint] = {}
    taken = {*SCORERS, *ALLOCATORS, *ADMISSIONS, *SELECTIONS, *TESTS, "none"}
    for point in entry_points(group=GROUP):
        where = f"entry point {point.name!r} = {point.value!r} of {GROUP}"
        if not point.name.isidentifier():
            raise ValueError(f"{where}: expected a name of letters, digits and _")
        if not _PATH.fullmatch(point.value):
            raise ValueError(f"{where}: expected package.module:Class")
        if point.name in taken or found.get(point.name, point).value != point.value:
            raise ValueError(f"{where}: another policy has this name; rename it")
        found[point.name] = point
    return found


@cache
def _own(word: str, base: Word) -> Word:
    """Import a user's own word; ValueError says what it is where it cannot be one."""
    place = EntryPoint(word, word, GROUP) if ":" in word else installed()[word]
    got, kind = f"got {shown(word)}", f"a subclass of {base.__module__}.{base.__name__}"
    try:
        found = getattr(import_module(place.module), place.attr, None)
    except Exception as error:  # whatever a user's module raises
        raise ValueError(
            f"{got}, whose import raises {type(error).__name__} ({shown(str(error))}), "
            "expected a module that Python finds, in an installed package or in a "
            "folder of PYTHONPATH, and that imports"
        ) from error
    if not isinstance(found, type) or not issubclass(found, base):
        what = "which its module does not have" if found is None else shown(found)
        raise ValueError(f"{got}, {what}, expected {kind}")
    if missing := ", ".join(sorted(getattr(found, "__abstractmethods__", ()))):
        raise ValueError(f"{got}, which does not define {missing}, expected {kind}")
    _check_own(got, found)
    return found


def _check_own(got: str, word: Word) -> None:
    """Raise ValueError where what a user's own word says of itself cannot be."""
    options: Any = word.Options
    base = import_module(f"{_ROOM}.options").BaseOptions
    if not (isinstance(options, type) and issubclass(options, base)):
        raise ValueError(f"{got}: expected Options to be a BaseOptions of {_ROOM}")
    keys = word.Options.model_fields
    if taken := RESERVED & keys.keys():
        raise ValueError(
            f"{got}: expected another name for its option {min(taken)}, which means "
            "something for every policy"
        )
    if not isinstance(word.query_window, int) and word.query_window not in keys:
        raise ValueError(
            f"{got}: got query_window {shown(word.query_window)}, expected a number or "
            "one of its options"
        )
    if not isinstance(word.refuses, Mapping):
        raise ValueError(f"{got}: expected refuses to be a mapping, word: reason")


def is_own(word: Word) -> bool:
    return not word.__module__.startswith(f"{_ROOM}.")


def keeps_all(name: str) -> bool:
    """Return whether a name has no scorer; imports nothing, so anybody may say it."""
    return all(
        word in ADMISSIONS or word in SELECTIONS or word in TESTS
        for word in name.split("+")
    )


@dataclass(frozen=True)
class PolicyInfo:
    """What a name, as given, means: the classes of its words.

    Args:
        admission: None for none.
        scorer: None where nothing is evicted.
        allocator: every scorer has one.
        whole: a policy that is not composed: a test policy, or the one that keeps
            everything under a selection.
    """

    name: str
    admission: Word = None
    scorer: Word = None
    allocator: Word = None
    whole: Word = None
    selection: Word = None

    @property
    def parts(self) -> tuple[Word, ...]:
        """The words that there are, in the order in which they act."""
        words = self.admission, self.scorer, self.allocator, self.whole, self.selection
        return tuple(word for word in words if word is not None)

    @property
    def summary(self) -> str:
        """One line: what each part does."""
        return "; ".join(word.summary for word in self.parts)

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Option values by the name of a preset, of all words."""
        return {
            name: keys for word in self.parts for name, keys in word.presets.items()
        }

    @property
    def options(self) -> dict[str, FieldInfo]:
        """The keys of `--kv-policy-config` that it reads."""
        return {
            key: field
            for word in self.parts
            for key, field in word.Options.model_fields.items()
        }

    @property
    def has_own(self) -> bool:
        """Whether a word is a user's own."""
        return any(map(is_own, self.parts))

    @property
    def is_test(self) -> bool:
        """Whether it is outside the grammar and drops nothing."""
        return self.name in TESTS

    @property
    def keeps_all(self) -> bool:
        """Whether there is no budget, so that events may keep everything."""
        return self.scorer is None

    @property
    def is_unbounded(self) -> bool:
        """Whether events have work without a budget: an admission's, a selection's."""
        return self.keeps_all and not self.is_test

    @property
    def fixed_keys(self) -> dict[str, str]:
        """Numbers that requests may not lower -> why, as the end of a message.

        Gates are trained for one window; without an eviction nothing reads the budget.
        """
        window = "decides for one window, the server's"
        keys = {} if self.admission is None else {"recent": window, "sinks": window}
        if self.is_unbounded:
            keys["budget"] = "evicts nothing and does not read it"
        return keys

    @property
    def pins_prompt(self) -> bool:
        """Whether prompt tokens are kept unless the user says otherwise."""
        return any(word.pins_prompt for word in self.parts)

    @property
    def measures_tokens(self) -> bool:
        """Whether requests compute all their tokens, none from the prefix cache."""
        return any(word.measures_tokens for word in self.parts)

    @property
    def placement(self) -> Callable[..., list[Any]] | None:
        """What chooses the superblocks of survivors, see `words.Word`."""
        return None if self.whole is None else self.whole.placement

    def window_tokens(self, options: Mapping[str, Any]) -> int:
        """Return how many queries are captured before an event."""
        return max(word.window_tokens(options) for word in self.parts)

    def is_ragged(self, options: Mapping[str, Any]) -> bool:
        """Return whether heads may hold different numbers of tokens."""
        is_ragged = any(word.ragged for word in self.parts)
        return is_ragged or bool(options.get("ragged", False))


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy with a value for every option that it reads; requests share it.

    Args:
        own: the options of each of its words.
    """

    info: PolicyInfo
    own: Mapping[Word, Any]

    def build(self, word: Word) -> Any:
        return word.build(self.own[word])

    @cached_property
    def options(self) -> dict[str, Any]:
        return {key: value for each in self.own.values() for key, value in each}

    @cached_property
    def window_tokens(self) -> int:
        return self.info.window_tokens(self.options)

    @cached_property
    def is_ragged(self) -> bool:
        return self.info.is_ragged(self.options)

    @property
    def is_exact(self) -> bool:
        """Whether a dropped token is masked at once instead of at the next event."""
        return bool(self.options.get("exact", False))

    @property
    def decides(self) -> bool:
        """Whether its admission decides while tokens are computed."""
        admission = self.info.admission
        return (admission is not None and admission.decides) or self.is_exact


def names() -> list[str]:
    """List every eviction of this package, test policies last; imports the allocators.

    `parse` also accepts each admission and each selection alone, and with `+` before
    and after an eviction.
    """
    evictions = [
        f"{allocator}-{scorer}" if allocator else scorer
        for allocator, word in ALLOCATORS.items()
        for scorer in SCORERS
        if scorer not in word.refuses
    ]
    return evictions + list(TESTS)


def parts() -> list[str]:
    """List every eviction, admission and selection by itself; each is a name."""
    return [*names(), *ADMISSIONS, *SELECTIONS]


def grammar(in_full: bool = True) -> str:
    """Say in one sentence which names are valid.

    In full it lists installed words and refused pairs, and imports the allocators.
    """
    allocators = ", ".join(filter(None, ALLOCATORS))
    own = "; your own: package.module:Class for a scorer or an allocator"
    if in_full:
        refused = [
            f"{allocator}-{scorer}"
            for allocator, word in ALLOCATORS.items()
            for scorer in word.refuses
        ]
        allocators += f", but not {', '.join(refused)}"
        own += "".join(f", {word}" for word in installed())
    return (
        "[ADMISSION+][ALLOCATOR-]SCORER[+SELECTION], or ADMISSION, SELECTION or "
        f"ADMISSION+SELECTION without a scorer; scorers: {', '.join(SCORERS)}; "
        f"allocators: {allocators}; admissions: "
        f"{', '.join(ADMISSIONS)}; selections: {', '.join(SELECTIONS)}{own}; for "
        f"tests: {', '.join(TESTS)}"
    )


def parse(name: str, key: str = "kv_policy") -> PolicyInfo:
    """Look a policy up by name; imports its words, a user's own included.

    Args:
        name: from who runs this process and never from a request.
        key: where the user gave it, for errors.

    Raises:
        ValueError: an unknown name, a combination that makes no sense, or a user's own
            word that cannot be used.
    """
    if not isinstance(name, str):
        raise ValueError(f"{key}: got {shown(name)}, expected {grammar()}")
    if name in TESTS:
        return PolicyInfo(name, whole=_load(TESTS[name]))
    words = name.split("+")
    admission = words.pop(0) if words[0] in ADMISSIONS else ""
    selection = words.pop() if words and words[-1] in SELECTIONS else ""
    if len(words) > 1 or not (words or admission or selection):
        raise _unknown(name, key, name)
    found = {
        "admission": ADMISSIONS[admission] if admission else None,
        "whole": None if words or admission else _load(KEEP_ALL),
        "selection": SELECTIONS[selection] if selection else None,
    }
    if words:
        found |= _eviction(name, words[0], admission, key)
    info = PolicyInfo(name, **found)
    if info.has_own:
        _check_options(info, key)
    return info


def _unknown(name: str, key: str, part: str) -> ValueError:
    """Return the error of a name of which a part is no policy."""
    question = nearest(part, parts())
    return ValueError(f"{key}: got {shown(name)}{question}, expected {grammar()}")


def _check_options(info: PolicyInfo, key: str) -> None:
    """Raise ValueError where words of a policy mean different things by an option."""
    known: dict[str, FieldInfo] = {}
    for word in info.parts:
        for option, field in word.Options.model_fields.items():
            other = known.setdefault(option, field)
            if any(getattr(other, part) != getattr(field, part) for part in _MEANING):
                raise ValueError(
                    f"{key}: got {info.name!r}, whose words have different options "
                    f"{option}, expected another name for one of them"
                )


def _eviction(name: str, eviction: str, admission: str, key: str) -> dict[str, Any]:
    """Return scorer and allocator of `[ALLOCATOR-]SCORER`; ValueError for others."""
    allocator, _, scorer = eviction.rpartition("-")
    try:
        installed()  # where one of them is wrong, no name is safe
        # A leading dash is no name, though the empty word is an allocator.
        is_name = not eviction.startswith("-")
        sharing = ALLOCATORS.find(allocator) if is_name else None
        scoring = SCORERS.find(scorer) if sharing is not None else None
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if sharing is None or scoring is None:
        raise _unknown(name, key, eviction)
    reason = _refusal(sharing.refuses, scorer, scoring, SCORERS)
    if reason is None and admission:
        refused = ADMISSIONS[admission].refuses
        reason = _refusal(refused, allocator, sharing, ALLOCATORS)
    if reason is not None:
        raise ValueError(f"{key}: got {shown(name)}, refused because {reason}")
    return {"scorer": scoring, "allocator": sharing}


def _refusal(
    refused: Mapping[str, str], name: str, word: Word, known: Words
) -> str | None:
    """Return why a word is refused, None where it is not.

    A user's own is refused as the words are whose classes it extends, and where all
    words of this package are.
    """
    if name in known:
        return refused.get(name)
    if all(each in refused for each in known):
        return next(iter(refused.values()))
    extended = (each for each in refused if each in known)
    return next((refused[n] for n in extended if issubclass(word, known[n])), None)


def resolve(info: PolicyInfo, given: Mapping[str, Any]) -> ResolvedPolicy:
    """Check `--kv-policy-config` and complete it: explicit, else preset, else default.

    For example `ams-tova` with `{"preset": "paper", "min_segment": 8}` has the window
    of 128 queries of its preset, the given 8, and defaults for the rest. ValueError for
    an unknown key, or a value outside its range.
    """
    known = info.options
    for key in given:
        if key not in known:
            valid = ", ".join(known) or "none"
            raise ValueError(
                f"kv_policy_config: got the unknown key {key!r}{nearest(key, known)}, "
                f"expected a key of {info.name!r} ({valid})"
            )
    values = {**info.presets.get(str(given.get("preset")), {}), **given}
    own = {}
    for word in info.parts:
        keys = values.keys() & word.Options.model_fields
        own[word] = word.Options(**{key: values[key] for key in keys})
    return ResolvedPolicy(info, own)
