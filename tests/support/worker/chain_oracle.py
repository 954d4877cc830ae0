"""What events should leave behind, token by token, in plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass

Masks = list[list[bool]]  # per head, one entry per held token


@dataclass(frozen=True)
class Chosen:
    """A policy's decision for one request; per head and held token, oldest first."""

    keep: Masks
    must_keep: Masks
    score: list[list[float]]


@dataclass(frozen=True)
class Rules:
    """How choices become whole pages.

    Args:
        is_ragged: heads may hold different numbers of pages.
        is_dynamic: the choice need not fill the destinations.
    """

    block_size: int
    is_ragged: bool
    is_dynamic: bool


def survivors(
    rules: Rules, chosen: Chosen, held: list[int], sinks: int, num_dest: int
) -> list[list[int]]:
    """Return each head's survivors as indices into what it holds.

    Args:
        held: full pages of each head below the frontier.
        sinks: first tokens that every head keeps.
        num_dest: superblocks to fill.
    """
    size = rules.block_size
    counts = [
        sum(row[: pages * size]) for row, pages in zip(chosen.keep, held, strict=True)
    ]
    quota = [num_dest] * len(held)
    if rules.is_ragged:
        quota = _quota(rules, counts, held, sinks, num_dest)
    kept = []
    for head, pages in enumerate(quota):

        def rank(token: int, head: int = head) -> tuple[bool, bool, float, int]:
            parts = (chosen.must_keep, chosen.keep, chosen.score)
            must, keep, score = (part[head][token] for part in parts)
            return bool(must), bool(keep), score, token

        best = sorted(range(held[head] * size), key=rank, reverse=True)
        kept.append(sorted(best[: pages * size]))
    return kept


def _quota(
    rules: Rules, counts: list[int], held: list[int], sinks: int, num_dest: int
) -> list[int]:
    """Deal pages one by one to the head with the most chosen tokens outside."""
    size, total = rules.block_size, num_dest * len(held)
    quota = [min(-(-sinks // size), pages) for pages in held]
    if rules.is_dynamic:
        wanted = sum(-(-count // size) for count in counts)
        total = min(total, max(wanted, 1))
    while sum(quota) < total:
        open_heads = [head for head, pages in enumerate(held) if quota[head] < pages]
        best = max(open_heads, key=lambda h: (counts[h] - quota[h] * size, -h))
        quota[best] += 1
    return quota


def is_ascending(tokens: Sequence[int]) -> bool:
    """Return whether tokens are in time order, none twice."""
    return all(a < b for a, b in zip(tokens, tokens[1:], strict=False))
