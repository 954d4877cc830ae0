"""Names of policies: the grammar, what each policy needs, and its options.

Called by cli, guards, config and the engine, which must load neither torch nor vLLM,
and by policies.factory, which imports what the dotted paths name.
Process: any

A name is `[ADMISSION][+EVICTION][+SELECTION]`, at least one part; EVICTION is
`[ALLOCATOR-]SCORER`. So far only eviction has words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvpolicy.policies.params import (
    AMS_PARAMS,
    AMS_PRESETS,
    POOL_KERNEL,
    WINDOW,
    Options,
    Param,
    check,
)


@dataclass(frozen=True)
class Word:
    """A scorer or an allocator: one word of the grammar.

    Args:
        path: "module:class" of its implementation.
        summary: half a line for help texts.
        source: where the method is published.
        window_tokens: queries it reads unless an option says otherwise.
        has_credit: keeps float32 state per token from event to event.
        params: options it reads.
        presets: option values by preset name.
        refuses: words it is not combined with, and why.
        placement: where survivors go; a name in block_manager.placement.
    """

    path: str
    summary: str
    source: str
    window_tokens: int = 0
    has_credit: bool = False
    params: tuple[Param, ...] = ()
    presets: Mapping[str, Options] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    placement: str = "in_place"


SCORERS = {
    "streaming": Word(
        "vllm_kvpolicy.policies.streaming:StreamingScorer",
        "sinks and the newest tokens",
        "StreamingLLM, arXiv 2309.17453",
    ),
    "tova": Word(
        "vllm_kvpolicy.policies.tova:TovaScorer",
        "attention of the newest query, mean over all heads",
        "TOVA, arXiv 2401.06104",
        window_tokens=1,
    ),
    "snapkv": Word(
        "vllm_kvpolicy.policies.snapkv:SnapKVScorer",
        "pooled attention of the newest queries",
        "SnapKV, arXiv 2404.14469",
        window_tokens=32,
        params=(WINDOW, POOL_KERNEL),
    ),
}
# The empty word is the allocator of a name without one.
ALLOCATORS = {
    "": Word(
        "vllm_kvpolicy.policies.uniform:UniformTopK",
        "best tokens of each head",
        "kvpress 0.4.0, ScorerPress",
    ),
    "ams": Word(
        "vllm_kvpolicy.policies.ams:AMSAllocator",
        "segments of equal attention mass, each with its quota",
        "AMS, arXiv 2605.23200",
        window_tokens=32,
        has_credit=True,
        params=AMS_PARAMS,
        presets=AMS_PRESETS,
        refuses={
            "streaming": "recency keeps the newest end of every segment, which says "
            "nothing about importance"
        },
    ),
}
TEST_POLICIES = {
    "identity": Word(
        "vllm_kvpolicy.policies.movement:MovementPolicy",
        "keeps everything, shuffles tokens at each event",
        "test policy of this project",
        placement="shuffled",
    ),
    "holes": Word(
        "vllm_kvpolicy.policies.movement:MovementPolicy",
        "keeps everything, gives back and takes again freed pages",
        "test policy of this project",
        placement="exchanged",
    ),
}


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
        default_window_tokens: see `window_tokens`.
        has_credit: keeps float32 state per token from event to event.
        protect_prompt: prompt tokens are kept unless the user says otherwise.
        is_test: outside the grammar, drops nothing.
        placement: where survivors go; a name in block_manager.placement.
        params: valid keys of `--kv-policy-config`.
        presets: option values by preset name.
    """

    name: str
    path: str | None
    scorer: str | None
    allocator: str | None
    summary: str
    source: str
    default_window_tokens: int = 0
    has_credit: bool = False
    protect_prompt: bool = False
    is_test: bool = False
    placement: str = "in_place"
    params: tuple[Param, ...] = ()
    presets: Mapping[str, Options] = field(default_factory=dict)

    @property
    def keeps_all(self) -> bool:
        """Whether an event drops nothing; only test policies do that."""
        return self.is_test

    def window_tokens(self, options: Options) -> int:
        """Queries captured before an event, given resolved options."""
        return options.get("window", self.default_window_tokens)


def names() -> list[str]:
    """List every valid name, test policies last."""
    evictions = [
        f"{allocator}-{scorer}" if allocator else scorer
        for allocator, word in ALLOCATORS.items()
        for scorer in SCORERS
        if scorer not in word.refuses
    ]
    return evictions + list(TEST_POLICIES)


def parse(name: str) -> PolicyInfo:
    """Look a policy up by name.

    Raises:
        ValueError: an unknown name, or a combination that makes no sense.
    """
    word = TEST_POLICIES.get(name) if isinstance(name, str) else None
    if word is not None:
        return PolicyInfo(
            name,
            word.path,
            None,
            None,
            word.summary,
            word.source,
            is_test=True,
            placement=word.placement,
        )
    allocator, _, scorer = str(name).rpartition("-")
    # A leading dash is no name, though the empty word is an allocator.
    known = allocator in ALLOCATORS and scorer in SCORERS
    if not known or str(name).startswith("-"):
        raise ValueError(
            f"kv_policy: got {name!r}, expected one of {', '.join(names())}"
        )
    if scorer in ALLOCATORS[allocator].refuses:
        reason = ALLOCATORS[allocator].refuses[scorer]
        raise ValueError(
            f"kv_policy: {name!r} is refused because {reason}; expected one of "
            f"{', '.join(names())}"
        )
    return _compose(name, ALLOCATORS[allocator], SCORERS[scorer])


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
        default_window_tokens=max(scorer.window_tokens, allocator.window_tokens),
        has_credit=allocator.has_credit,
        params=tuple(params.values()),
        presets={**scorer.presets, **allocator.presets},
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
        check(params[key], options)
    values = {name: param.default for name, param in params.items()}
    if "preset" in params:
        preset = info.presets[options.get("preset", values["preset"])]
        values.update((key, preset[key]) for key in params if key in preset)
    values.update(options)
    for param in info.params:
        check(param, values)
    return values
