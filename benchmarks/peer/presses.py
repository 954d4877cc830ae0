"""Builds presses from kvpress' classes."""

from collections.abc import Mapping
from typing import Any

import kvpress

from benchmarks.peer.catalogue import FULL, PRESSES, SORTED
from benchmarks.peer.tracking import Tracker, Watching, WatchingMask

Options = Mapping[str, Mapping[str, Any]]


def build(
    row: str, budget: int, interval: int, options: Options, tracker: Tracker | None
) -> kvpress.DecodingPress | None:
    """Return a row's press inside kvpress' decoding press; None for FULL.

    Args:
        row: `POLICY` or `POLICY:sorted`.
        tracker: records events; None for kvpress' own classes.

    Raises:
        AssertionError: the decoding press does not take this press.
    """
    press = plain(row, options, tracker)
    if press is None:
        return None
    return kvpress.DecodingPress(
        base_press=press, compression_interval=interval, target_size=budget
    )


def build_once(
    row: str, budget: int, at: int, options: Options, tracker: Tracker | None
) -> Any:
    """Return a row's press for one compression of a prompt; None for FULL.

    Args:
        at: tokens of the prompt.
    """
    press = plain(row, options, tracker)
    if press is not None:
        press.compression_ratio = 1 - budget / at
    return press


def plain(row: str, options: Options, tracker: Tracker | None) -> Any:
    """Return a row's press that compresses nothing yet; see `build`."""
    policy, _, variant = row.partition(":")
    if policy == FULL:
        return None
    press = PRESSES[policy]
    kind = getattr(kvpress, press.name)
    arguments = dict(options[policy])
    if press.inner:
        inner = getattr(kvpress, PRESSES[press.inner].name)
        arguments["press"] = inner(**options[press.inner])
    if tracker is not None:
        if issubclass(kind, kvpress.ScorerPress):
            kind = watched(Watching, kind, tracker, variant == SORTED)
        elif issubclass(kind, kvpress.AdaKVPress):
            kind = watched(WatchingMask, kind, tracker, False)
    return kind(**arguments)


def watched(mixin: type, kind: type, tracker: Tracker, in_order: bool) -> type:
    """Return a press class that a mixin of `tracking` watches."""
    return type(
        f"Watched{kind.__name__}",
        (mixin, kind),
        {"tracker": tracker, "in_order": in_order},
    )
