"""Names of policies: the grammar, what each policy needs, and its options.

A name is `[ADMISSION][+EVICTION][+SELECTION]`, at least one part; EVICTION is
`[ALLOCATOR-]SCORER`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_kvpolicy.policies.catalogue.options import Options, Param, check
from vllm_kvpolicy.policies.catalogue.words import (
    ADMISSIONS,
    ALLOCATORS,
    KEEP_ALL,
    SCORERS,
    SELECTIONS,
    TEST_POLICIES,
    Word,
)


@dataclass(frozen=True)
class PolicyInfo:
    """What the rest of the system knows about a policy before it is built.

    Args:
        name: the name as given.
        path: "module:class" of a policy that is not composed, else None.
        scorer: "module:class", None unless composed.
        allocator: "module:class", None unless composed.
        summary: one line.
        source: where its parts are published.
        windows: per part, queries it reads and the option that overrides them.
        protect_prompt: prompt tokens are kept unless the user says otherwise.
        is_test: outside the grammar, drops nothing.
        placement: where survivors go; a name in block_manager.placement.
        params: valid keys of `--kv-policy-config`.
        presets: option values by preset name.
        admission: "module:class", None for none.
        selection: "module:class" of what chooses pages to read, None for all.
    """

    name: str
    path: str | None
    scorer: str | None
    allocator: str | None
    summary: str
    source: str
    windows: tuple[tuple[str | None, int], ...] = ()
    ragged: bool = False
    protect_prompt: bool = False
    is_test: bool = False
    placement: str = "in_place"
    params: tuple[Param, ...] = ()
    presets: Mapping[str, Options] = field(default_factory=dict)
    admission: str | None = None
    selection: str | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether there is no budget, so that events may keep everything."""
        return self.scorer is None

    @property
    def is_unbounded(self) -> bool:
        """Whether events have work without a budget: an admission's, a selection's."""
        return self.keeps_all and not self.is_test

    @property
    def fixed_keys(self) -> tuple[str, ...]:
        """Numbers that requests may not lower.

        Gates are trained for one window; without an eviction nothing reads the budget.
        """
        keys = () if self.admission is None else ("recent", "sinks")
        return (*keys, "budget") if self.is_unbounded else keys

    def window_tokens(self, options: Options) -> int:
        """Queries captured before an event, given resolved options."""
        sizes = (options.get(key or "", default) for key, default in self.windows)
        return max(sizes, default=0)

    def is_ragged(self, options: Options) -> bool:
        """Whether heads may hold different numbers of tokens."""
        return self.ragged or bool(options.get("ragged", False))


def names() -> list[str]:
    """List every eviction, test policies last.

    `parse` also knows each admission and each selection alone, and with `+` in front of
    an eviction and behind one.
    """
    evictions = [
        f"{allocator}-{scorer}" if allocator else scorer
        for allocator, word in ALLOCATORS.items()
        for scorer in SCORERS
        if scorer not in word.refuses
    ]
    return evictions + list(TEST_POLICIES)


def parts() -> list[str]:
    """List every eviction, admission and selection by itself; each is a name."""
    return [*names(), *ADMISSIONS, *SELECTIONS]


def grammar() -> str:
    """Say in one sentence which names are valid."""
    allocators = ", ".join(filter(None, ALLOCATORS))
    refused = [
        f"{allocator}-{scorer}"
        for allocator, word in ALLOCATORS.items()
        for scorer in word.refuses
    ]
    return (
        f"SCORER or ALLOCATOR-SCORER; scorers {', '.join(SCORERS)}; allocators "
        f"{allocators}; not {', '.join(refused)}; or ADMISSION, alone or as ADMISSION+ "
        f"in front; admissions {', '.join(ADMISSIONS)}; or SELECTION, alone or as "
        f"+SELECTION behind; selections {', '.join(SELECTIONS)}; for tests "
        f"{', '.join(TEST_POLICIES)}"
    )


def parse(name: str) -> PolicyInfo:
    """Look a policy up by name.

    Raises:
        ValueError: an unknown name, or a combination that makes no sense.
    """
    word = TEST_POLICIES.get(name) if isinstance(name, str) else None
    if word is not None:
        return replace(_of_path(name, word), is_test=True)
    parts = str(name).split("+")
    admission = parts.pop(0) if parts[0] in ADMISSIONS else ""
    selection = parts.pop() if parts and parts[-1] in SELECTIONS else ""
    if len(parts) > 1 or not (parts or admission or selection):
        raise ValueError(f"kv_policy: got {name!r}, expected {grammar()}")
    info = _eviction(name, parts[0]) if parts else None
    if admission:
        info = _admitted(name, ADMISSIONS[admission], info)
    elif info is None:
        info = _of_path(name, KEEP_ALL)
    return _selecting(name, info, SELECTIONS[selection]) if selection else info


def _of_path(name: str, word: Word) -> PolicyInfo:
    """Describe a policy that is not composed."""
    return PolicyInfo(
        name,
        word.path,
        None,
        None,
        word.summary,
        word.source,
        placement=word.placement,
        params=word.params,
    )


def _eviction(name: str, part: str) -> PolicyInfo:
    """Describe the part of a name that is `[ALLOCATOR-]SCORER`.

    Raises:
        ValueError: it is not, or one refuses the other.
    """
    allocator, _, scorer = part.rpartition("-")
    # A leading dash is no name, though the empty word is an allocator.
    known = allocator in ALLOCATORS and scorer in SCORERS
    if not known or part.startswith("-"):
        raise ValueError(f"kv_policy: got {name!r}, expected {grammar()}")
    if scorer in ALLOCATORS[allocator].refuses:
        reason = ALLOCATORS[allocator].refuses[scorer]
        raise ValueError(f"kv_policy: got {name!r}, refused because {reason}")
    return _compose(part, ALLOCATORS[allocator], SCORERS[scorer])


def _compose(name: str, allocator: Word, scorer: Word) -> PolicyInfo:
    """Describe the policy that an allocator and a scorer form."""
    params = {param.name: param for param in scorer.params + allocator.params}
    return PolicyInfo(
        name=name,
        path=None,
        scorer=scorer.path,
        allocator=allocator.path,
        summary=f"{scorer.summary}; {allocator.summary}",
        source=f"{scorer.source}; {allocator.source}",
        windows=tuple(
            (word.window_key, word.window_tokens) for word in (scorer, allocator)
        ),
        ragged=allocator.ragged,
        protect_prompt=scorer.protect_prompt or allocator.protect_prompt,
        params=tuple(params.values()),
        presets={**scorer.presets, **allocator.presets},
    )


def _admitted(name: str, admission: Word, eviction: PolicyInfo | None) -> PolicyInfo:
    """Describe an admission, alone or in front of an eviction.

    Raises:
        ValueError: it refuses the eviction.
    """
    if eviction is None:
        return PolicyInfo(
            name=name,
            path=None,
            scorer=None,
            allocator=None,
            summary=admission.summary,
            source=admission.source,
            ragged=admission.ragged,
            params=admission.params,
            admission=admission.path,
        )
    allocator = eviction.name.rpartition("-")[0]
    if allocator in admission.refuses:
        reason = admission.refuses[allocator]
        raise ValueError(f"kv_policy: got {name!r}, refused because {reason}")
    return replace(
        eviction,
        name=name,
        summary=f"{admission.summary}; {eviction.summary}",
        source=f"{admission.source}; {eviction.source}",
        ragged=True,
        params=admission.params + eviction.params,
        admission=admission.path,
    )


def _selecting(name: str, info: PolicyInfo, selection: Word) -> PolicyInfo:
    """Describe a policy behind which only some of what it keeps is read."""
    return replace(
        info,
        name=name,
        summary=f"{info.summary}; {selection.summary}",
        source=f"{info.source}; {selection.source}",
        ragged=True,
        params=info.params + selection.params,
        selection=selection.path,
    )


def resolve_options(info: PolicyInfo, options: Options) -> dict[str, Any]:
    """Check `--kv-policy-config` and complete it: explicit, else preset, else default.

    Args:
        info: the policy.
        options: keys and values as the user gave them.

    Returns:
        A value for every key that the policy knows.

    Raises:
        ValueError: an unknown key, or a value outside its range.
    """
    params = {param.name: param for param in info.params}
    for key in options:
        if key not in params:
            valid = ", ".join(params) or "none"
            raise ValueError(
                f"kv_policy_config: got {key!r}, expected keys of {info.name!r} "
                f"({valid})"
            )
    for key in options:
        check(params[key], options)
    values = {name: param.default for name, param in params.items()}
    if "preset" in params:
        preset = info.presets[options.get("preset", values["preset"])]
        values.update((key, preset[key]) for key in params if key in preset)
    values.update(options)
    for param in info.params:
        check(param, values)
    return values
