"""Checks that files are comparable, and tests the peer against us in pairs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.groups import POOLED, Groups, Row, grouped
from benchmarks.accuracy.results import Line
from benchmarks.peer.catalogue import SORTED
from benchmarks.stats import mcnemar

THEIR_OWN = {"variants", "own_server", "threads", "peer", "press_options"}
"""Settings that the files of both sides need not share; all others can change an
answer."""

Read = tuple[Line, Sequence[Line]]
"""Settings and lines of an output file."""


def check_same(files: Mapping[Path, Read]) -> None:
    """Check that files have the same questions and comparable settings.

    Raises:
        ValueError: questions differ, or settings that can change an answer.
    """
    digests: dict[tuple, tuple[str, Path]] = {}
    first, (settings, _) = next(iter(files.items()))
    for path, (other, lines) in files.items():
        for key in sorted((settings.keys() | other.keys()) - THEIR_OWN):
            if settings.get(key) != other.get(key):
                raise ValueError(
                    f"{path}: expected {key} {settings.get(key)!r} as in {first}, got "
                    f"{other.get(key)!r}; remove one of them or name another --folder"
                )
        for line in lines:
            name, digest = (line["task"], line["id"]), line["digest"]
            known, where = digests.setdefault(name, (digest, path))
            if known != digest:
                raise ValueError(
                    f"{path}: {line['task']} {line['id']} is another question than in "
                    f"{where}; remove one of them or name another --folder"
                )


def against_ours(theirs: Sequence[Line], ours: Sequence[Line]) -> Iterator[Row]:
    """Yield paired tests of the peer's rows against our policy, all tasks together.

    Returns:
        Per row: `pairs`: questions that both answered; `only_peer`, `only_ours`: those
        that one of them alone got right; `p`: McNemar's exact two-sided value.
    """
    peers, own = pooled(theirs), pooled(ours)
    for (row, budget, interval), answers in peers.items():
        policy = row.removesuffix(f":{SORTED}")
        other = own.get((policy, budget, interval), {})
        both = Counter((right, other[q]) for q, right in answers.items() if q in other)
        if both:
            counts = both[True, False], both[False, True]
            yield {
                "policy": row,
                "budget": budget,
                "interval": interval,
                "pairs": both.total(),
                "only_peer": counts[0],
                "only_ours": counts[1],
                "p": mcnemar(*counts),
            }


def pooled(lines: Sequence[Line]) -> dict[tuple, dict[tuple, bool]]:
    """Return which questions are right, by policy, budget and interval."""
    groups: Groups = grouped(lines)
    return {
        place: {(line["task"], line["id"]): line["correct"] for line in members}
        for (place, family), members in groups.items()
        if family == POOLED
    }
