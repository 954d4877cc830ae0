"""Maps our policies to presses of the peer and their options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FULL = "full"
"""As in accuracy.servers, which the peer's environment cannot import."""
SORTED = "sorted"
"""Variant of a row: what an event keeps stays in its order in the cache."""
SINKS = 4
"""First tokens of a prompt that are looked for after each event."""


@dataclass(frozen=True)
class Press:
    """A press of kvpress.

    Attributes:
        name: its class in kvpress.
        options: its option -> our option of the same meaning.
        inner: policy whose press it wraps, empty for none.
        is_sortable: it stores kept tokens in the order of their scores.
        note: remark on its row, empty for none.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    inner: str = ""
    is_sortable: bool = True
    note: str = ""


_WINDOW = {"window_size": "window", "kernel_size": "pool_kernel"}

PRESSES = {
    "streaming": Press("StreamingLLMPress"),
    "random": Press("RandomPress", is_sortable=False),
    "tova": Press("TOVAPress"),
    "snapkv": Press(
        "SnapKVPress",
        _WINDOW,
        note="the default window of 64 needs more than 64 buffered hidden states, and "
        "an interval of 64 buffers 64; in decoding its queries are all rotated to the "
        "newest position",
    ),
    "keydiff": Press("KeyDiffPress"),
    "knorm": Press("KnormPress"),
    "expected": Press(
        "ExpectedAttentionPress",
        {
            "n_future_positions": "n_future",
            "use_covariance": "covariance",
            "use_vnorm": "value_norm",
            "epsilon": "epsilon",
        },
        note="future positions count from the number of buffered hidden states, not "
        "from the newest token",
    ),
    "lagkv": Press(
        "LagKVPress",
        {"lag_size": "lag", "cross_scoring": "cross"},
        note="below 4 + 2 lags of tokens it scores by recency",
    ),
    "adakv-snapkv": Press(
        "AdaKVPress",
        {"alpha_safeguard": "adakv_floor"},
        inner="snapkv",
        is_sortable=False,
        note="drops nothing: keys are overwritten with ones that the current query "
        "ignores, all tokens stay in the cache, and later events may choose "
        "overwritten ones (`revived`)",
    ),
    "chunk-snapkv": Press(
        "ChunkKVPress",
        {"chunk_length": "chunk_length"},
        inner="snapkv",
        is_sortable=False,
    ),
    "pyramid-snapkv": Press(
        "PyramidKVPress",
        {**_WINDOW, "beta": "pyramid_beta"},
        note="layers go on from what they hold, so their budgets change from event to "
        "event and do not average to the budget (`kept_mean`)",
    ),
}


def rows_of(policies: list[str]) -> list[str]:
    """Return the rows of policies: as shipped, and sorted if that can differ.

    Raises:
        ValueError: kvpress has no press for one of them.
    """
    rows = []
    for policy in policies:
        if policy != FULL and policy not in PRESSES:
            raise ValueError(
                f"policies: expected any of {[FULL, *PRESSES]}, got {policy!r}"
            )
        rows.append(policy)
        if policy in PRESSES and PRESSES[policy].is_sortable:
            rows.append(f"{policy}:{SORTED}")
    return rows


def options_of(policy: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a policy's press and, apart, of the press that it wraps."""
    return {theirs: ours[name] for theirs, name in PRESSES[policy].options.items()}
