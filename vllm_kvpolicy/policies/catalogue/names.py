"""Names of policies: the grammar, and what a name says about its policy.

A name is `[ADMISSION][+EVICTION][+SELECTION]`, at least one part; EVICTION is
`[ALLOCATOR-]SCORER`. For example `wgkv+ams-snapkv+quest` has all four words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from vllm_kvpolicy.config_keys import shown
from vllm_kvpolicy.policies.catalogue.admissions import ADMISSIONS
from vllm_kvpolicy.policies.catalogue.allocators import ALLOCATORS
from vllm_kvpolicy.policies.catalogue.rows import WordRow
from vllm_kvpolicy.policies.catalogue.scorers import SCORERS
from vllm_kvpolicy.policies.catalogue.selections import KEEP_ALL, SELECTIONS
from vllm_kvpolicy.policies.catalogue.testing import TEST_POLICIES


@dataclass(frozen=True)
class PolicyInfo:
    """What a name means: the rows of its words.

    Args:
        name: the name as given.
        admission: row of its admission, None for none.
        scorer: row of its scorer, None where nothing is evicted.
        allocator: row of its allocator; every scorer has one.
        whole: row of a policy that is not composed: a test policy, or the one that
            keeps everything under a selection.
        selection: row of what chooses pages to read, None where all are read.
    """

    name: str
    admission: WordRow | None = None
    scorer: WordRow | None = None
    allocator: WordRow | None = None
    whole: WordRow | None = None
    selection: WordRow | None = None

    @property
    def parts(self) -> tuple[WordRow, ...]:
        """The rows that there are, in the order in which they act."""
        rows = self.admission, self.scorer, self.allocator, self.whole, self.selection
        return tuple(row for row in rows if row is not None)

    @property
    def summary(self) -> str:
        """One line: what each part does."""
        return "; ".join(row.summary for row in self.parts)

    @property
    def options(self) -> dict[str, FieldInfo]:
        """The keys of `--kv-policy-config` that it reads."""
        return {
            key: field
            for row in self.parts
            for key, field in row.options.model_fields.items()
        }

    @property
    def is_test(self) -> bool:
        """Whether it is outside the grammar and drops nothing."""
        return self.whole in TEST_POLICIES.values()

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
    def protect_prompt(self) -> bool:
        """Whether prompt tokens are kept unless the user says otherwise."""
        return any(row.protect_prompt for row in self.parts)

    @property
    def measures_tokens(self) -> bool:
        """Whether requests compute all their tokens, none from the prefix cache."""
        return any(row.measures_tokens for row in self.parts)

    @property
    def weighs_itself(self) -> bool:
        """Whether attention of its own leaves out a model's learned sinks."""
        return any(row.weighs_itself for row in self.parts)

    @property
    def decides_later(self) -> bool:
        """Whether a token decides about the token before it."""
        return any(row.decides_later for row in self.parts)

    @property
    def placement(self) -> str | None:
        """What chooses the superblocks of survivors, see `WordRow`."""
        return None if self.whole is None else self.whole.placement

    def window_tokens(self, options: Mapping[str, Any]) -> int:
        """Return how many queries are captured before an event.

        Args:
            options: resolved options; a missing one takes its default.
        """
        return max(row.window_tokens(options) for row in self.parts)

    def is_ragged(self, options: Mapping[str, Any]) -> bool:
        """Return whether heads may hold different numbers of tokens."""
        is_ragged = any(row.ragged for row in self.parts)
        return is_ragged or bool(options.get("ragged", False))

    def is_dynamic(self, options: Mapping[str, Any]) -> bool:
        """Return whether the text decides how much it keeps, up to the budget.

        Args:
            options: resolved options.
        """
        return self.admission is not None or any(
            row.is_dynamic(options) for row in self.parts
        )

    def decides(self, options: Mapping[str, Any]) -> bool:
        """Return whether its admission decides while tokens are computed."""
        decides = self.admission is not None and self.admission.decides
        return decides or bool(options.get("exact", False))


def names() -> list[str]:
    """List every eviction, test policies last.

    `parse` also accepts each admission and each selection alone, and with `+` before
    and after an eviction.
    """
    evictions = [
        f"{allocator}-{scorer}" if allocator else scorer
        for allocator, row in ALLOCATORS.items()
        for scorer in SCORERS
        if scorer not in row.refuses
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
        for allocator, row in ALLOCATORS.items()
        for scorer in row.refuses
    ]
    return (
        "[ADMISSION+][ALLOCATOR-]SCORER[+SELECTION], or ADMISSION, SELECTION or "
        f"ADMISSION+SELECTION without a scorer; scorers: {', '.join(SCORERS)}; "
        f"allocators: {allocators}, but not {', '.join(refused)}; admissions: "
        f"{', '.join(ADMISSIONS)}; selections: {', '.join(SELECTIONS)}; for tests: "
        f"{', '.join(TEST_POLICIES)}"
    )


def parse(name: str, key: str = "kv_policy") -> PolicyInfo:
    """Look a policy up by name.

    Args:
        name: of the policy.
        key: where the user gave it, for errors.

    Raises:
        ValueError: an unknown name, or a combination that makes no sense.
    """
    test = TEST_POLICIES.get(name) if isinstance(name, str) else None
    if test is not None:
        return PolicyInfo(name, whole=test)
    words = str(name).split("+")
    admission = words.pop(0) if words[0] in ADMISSIONS else ""
    selection = words.pop() if words and words[-1] in SELECTIONS else ""
    if len(words) > 1 or not (words or admission or selection):
        raise ValueError(f"{key}: got {shown(name)}, expected {grammar()}")
    allocator, _, scorer = words[0].rpartition("-") if words else ("", "", "")
    if words:
        _check_eviction(name, words[0], key)
    if words and admission and allocator in ADMISSIONS[admission].refuses:
        reason = ADMISSIONS[admission].refuses[allocator]
        raise ValueError(f"{key}: got {shown(name)}, refused because {reason}")
    return PolicyInfo(
        name,
        admission=ADMISSIONS.get(admission),
        scorer=SCORERS.get(scorer),
        allocator=ALLOCATORS[allocator] if words else None,
        whole=None if words or admission else KEEP_ALL,
        selection=SELECTIONS.get(selection),
    )


def _check_eviction(name: str, eviction: str, key: str) -> None:
    """Raise ValueError unless a part of a name is `[ALLOCATOR-]SCORER`."""
    allocator, _, scorer = eviction.rpartition("-")
    # A leading dash is no name, though the empty word is an allocator.
    known = allocator in ALLOCATORS and scorer in SCORERS
    if not known or eviction.startswith("-"):
        raise ValueError(f"{key}: got {shown(name)}, expected {grammar()}")
    if scorer in ALLOCATORS[allocator].refuses:
        reason = ALLOCATORS[allocator].refuses[scorer]
        raise ValueError(f"{key}: got {shown(name)}, refused because {reason}")


def resolve_options(info: PolicyInfo, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check `--kv-policy-config` and complete it: explicit, else preset, else default.

    For example `ams-tova` with `{"preset": "paper", "min_segment": 8}` has the window
    of 128 queries of its preset, the given 8, and defaults for the rest.

    Args:
        info: the policy.
        given: keys and values as the user gave them.

    Returns:
        A value for every key that the policy reads.

    Raises:
        ValueError: an unknown key, or a value outside its range.
    """
    known = info.options
    for key in given:
        if key not in known:
            valid = ", ".join(known) or "none"
            raise ValueError(
                f"kv_policy_config: got the unknown key {key!r}, expected a key of "
                f"{info.name!r} ({valid})"
            )
    values = {**_preset(info, given), **given}
    return {key: value for row in info.parts for key, value in row.read(values)}


def _preset(info: PolicyInfo, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of the preset that the user named; none for a wrong one."""
    presets = {name: keys for row in info.parts for name, keys in row.presets.items()}
    chosen = given.get("preset")
    return presets.get(chosen, {}) if isinstance(chosen, str) else {}
