"""Hints of a request: ranges of its tokens that stay, and ranges that go first.

A range is [first, end) of positions, counted from the first token of the prompt. It is
read where its tokens are: also ranges behind the prompt are valid, and wait.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from vllm_kvpolicy.config_keys import DROP_FIRST, KEEP, MESSAGE_KEYS, MOST, wrong

MOST_RANGES = 256  # of a kind
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Hints:
    """What a request asks for; ranges ascend and are apart.

    Args:
        keep: what every KV head keeps.
        drop_first: what goes before any other token goes, in every KV head.
        missed: what has no effect: what does not fit the budget, and pinned tokens and
            sinks that should go.
    """

    keep: Ranges = ()
    drop_first: Ranges = ()
    missed: Ranges = ()

    def __bool__(self) -> bool:
        return bool(self.keep or self.drop_first or self.missed)

    def num_kept(self, first: int, end: int) -> int:
        """Return how many of the tokens [first, end) are to stay."""
        return sum(max(min(e, end) - max(f, first), 0) for f, e in self.keep)

    def fitted(self, first: int, room: float) -> "Hints":
        """Keep as many of the first tokens as fit; `missed` are the others.

        Args:
            first: tokens before this one stay anyway.
            room: tokens.
        """
        kept, missed = [], []
        for start, end in self.keep:
            fits = int(min(max(start, first) + room, end))
            kept += [(start, fits)] if fits > start else []
            missed += [(max(fits, start), end)] if fits < end else []
            room -= max(fits - max(start, first), 0)
        dropped, stays = _cut(self.drop_first, first)
        return Hints(tuple(kept), dropped, _joined((*missed, *stays)))

    def said(self, num_tokens: int) -> dict[str, list[int]]:
        """Return what an answer of so many tokens, prompt included, says of them.

        Ranges behind its last token are `missed`. JSON-able, in the form of a request.
        """
        (late_keep, keep), (late_drop, drop) = (
            _cut(ranges, num_tokens) for ranges in (self.keep, self.drop_first)
        )
        missed = (*self.missed, *late_keep, *late_drop)
        said = {"keep": keep, "drop_first": drop, "missed": _joined(missed)}
        return {name: [*chain(*ranges)] for name, ranges in said.items()}


def _cut(ranges: Ranges, place: int) -> tuple[Ranges, Ranges]:
    """Return what of some ranges begins at a position, and what ends there."""
    return (
        tuple((max(first, place), end) for first, end in ranges if end > place),
        tuple((first, min(end, place)) for first, end in ranges if first < place),
    )


NO_HINTS = Hints()


def read_hints(asked: Mapping[str, Any]) -> Hints:
    """Read the hints among the keys of a request.

    Raises:
        ValueError: a bad value, ranges that are to stay and to go, or messages, whose
            ranges only a server that renders a chat knows.
    """
    for key, ranges in MESSAGE_KEYS.items():
        if key in asked:
            expected = f"{ranges} with tokens: only chats count messages"
            raise wrong(key, asked[key], expected)
    keep, drop = (ranges_of(key, asked.get(key, [])) for key in (KEEP, DROP_FIRST))
    for (_, end), (first, _) in pairwise(sorted(keep + drop)):
        if first < end:
            expected = f"no token of {KEEP}, got {first} in both"
            raise wrong(DROP_FIRST, asked[DROP_FIRST], expected)
    return Hints(keep, drop)


def ranges_of(key: str, value: Any) -> Ranges:
    """Return sorted ranges of a flat list, those that touch as one; or ValueError."""
    expected = (
        f"a list of first, end, first, end, ... of up to {MOST_RANGES} ranges of tokens"
    )
    if not isinstance(value, list | tuple) or len(value) % 2:
        raise wrong(key, value, expected)
    pairs = list(zip(value[::2], value[1::2], strict=True))
    for pair in pairs:
        is_whole = all(type(number) is int for number in pair)
        if not (is_whole and 0 <= pair[0] < pair[1] <= MOST):
            raise wrong(key, list(pair), f"integers 0 <= first < end <= {MOST}")
    found = _joined(pairs)
    if len(found) > MOST_RANGES:
        raise wrong(key, value, expected)
    return found


def _joined(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Return sorted ranges, those that touch as one."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(pairs):
        if found and first <= found[-1][1]:
            first, end = found[-1][0], max(found.pop()[1], end)
        found.append((first, end))
    return tuple(found)
