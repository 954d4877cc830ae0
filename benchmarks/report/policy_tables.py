"""Makes the tables of policies: what they get right, and in how far they differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.groups import POOLED
from benchmarks.accuracy.pairs import REPEATED, bases_of, difference_of
from benchmarks.accuracy.servers import FULL
from benchmarks.report.records import (
    ANSWER,
    SCORES,
    Row,
    check_keys,
    known_score,
    read,
    share_of,
)
from benchmarks.stats import holm

OPTIONS = {"budget", "interval", "score"}
COMPARED = {
    score: "right alone, wrong alone" if score == ANSWER else "difference [95 %]"
    for score in (*SCORES, REPEATED)
}
"""Score -> what a comparison shows of it, before its p."""


def by_family(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table with the families of the first file as columns.

    Args:
        wanted: `files`, `rows`; `budget` and `interval`, by default the only ones;
            `score`, one of SCORES, by default the answer.
    """
    check_keys(wanted, {"files", "rows"}, OPTIONS)
    (score,) = _scores(wanted, most=1)
    records = [read(folder / name) for name in wanted["files"]]
    families = list(dict.fromkeys(row["family"] for row in records[0]["summary"]))
    families.remove(POOLED)
    families += [POOLED] if len(families) > 2 else []
    rows = [[f"policy: {score}", *families, "answers cut off"]]
    for name in wanted["rows"]:
        label, record, policy = _row(name, records)
        found = rows_of(record, policy, wanted)
        missing = [family for family in [*families, POOLED] if family not in found]
        if missing:
            raise ValueError(
                f"table: expected {missing} of {policy} in {wanted['files']}, got "
                "none; choose another budget, interval or row"
            )
        cells = [label, *(share_of(found[family], score) for family in families)]
        cells.append(f"{100 * found[POOLED]['capped']:.0f} %")
        rows.append(cells)
    return rows


def by_budget(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of all tasks together, with the first file's budgets as columns.

    Args:
        wanted: `files`, `rows`; `interval`, by default the only one; `budget`, one or
            a list, by default all; `score`: one of SCORES or a list, by default the
            answer.
    """
    check_keys(wanted, {"files", "rows"}, OPTIONS)
    scores = _scores(wanted, most=len(SCORES))
    records = [read(folder / name) for name in wanted["files"]]
    budgets = _budgets(wanted, records[0])
    rows = [["policy", *(f"{s} at {budget}" for s in scores for budget in budgets)]]
    for name in wanted["rows"]:
        label, record, policy = _row(name, records)
        found = [_pooled(record, policy, wanted, budget) for budget in budgets]
        if not any(found):
            raise ValueError(f"table: expected {policy} in {wanted['files']}, got none")
        cells = [share_of(row, s) if row else "-" for s in scores for row in found]
        rows.append([label, *cells])
    return rows


def comparisons(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of paired tests over all tasks together, a row per pair.

    The p values are corrected by Holm for all tests that the table has, whatever the
    score.

    Args:
        wanted: `files`, one of them; `rows`; `against`: see `pair_of`, one or a list;
            `interval`, by default the only one; `budget`, one or a list, by default
            all; `score`: one of COMPARED or a list, by default the answer.

    Raises:
        ValueError: see `tables.fill`, or a row without a test.
    """
    check_keys(wanted, {"files", "rows", "against"}, OPTIONS)
    scores = _scores(wanted, len(COMPARED), [*COMPARED])
    (record,) = [read(folder / name) for name in wanted["files"]]
    pairs = []
    for policy in wanted["rows"]:
        found = [
            pair
            for budget in _budgets(wanted, record)
            if (row := _pooled(record, policy, wanted, budget))
            for against in _listed(wanted["against"])
            if (pair := pair_of(record, row, against))
        ]
        if not found:
            raise ValueError(
                f"table: expected tests of {policy} against {wanted['against']} in "
                f"{wanted['files']}, got none"
            )
        pairs += found
    tested = [[_compared(pair, score) for score in scores] for pair in pairs]
    corrected = iter(holm([p for cells in tested for _, p in cells]))
    names = [f"{score}: {COMPARED[score]}, p" for score in scores]
    return [["policy", "against", "budget", *names]] + [
        [f"`{pair['policy']}`", f"`{pair['against']}`", str(pair["budget"])]
        + [f"{text}, {next(corrected):.2g}" for text, _ in cells]
        for pair, cells in zip(pairs, tested, strict=True)
    ]


def _listed(named: Any) -> list[Any]:
    return named if isinstance(named, list) else [named]


def _scores(wanted: Row, most: int, known: Sequence[str] = SCORES) -> list[str]:
    """Return the scores that a table shows.

    Raises:
        ValueError: an unknown score, or more than a table has room for.
    """
    scores = _listed(wanted.get("score", ANSWER))
    if not 0 < len(scores) <= most or not set(scores) <= set(known):
        raise ValueError(
            f"table: expected a score of {list(known)}, at most {most}, got "
            f"{dict(wanted)}"
        )
    return scores


def _budgets(wanted: Row, record: Row) -> list[int]:
    """Return the budgets that a table shows.

    Raises:
        ValueError: one that the file has not.
    """
    known = sorted({row["budget"] for row in record["summary"]} - {None})
    named = _listed(wanted.get("budget", known))
    if not named or not set(named) <= set(known):
        raise ValueError(f"table: expected budgets of {known}, got {dict(wanted)}")
    return named


def _pooled(record: Row, policy: str, wanted: Row, budget: int) -> Row | None:
    """Return a policy's row of all tasks, None if the file has none."""
    return rows_of(record, policy, {**wanted, "budget": budget}).get(POOLED)


def _compared(pair: Row, score: str) -> tuple[str, float]:
    """Return what a pair's test of a score found, and its p."""
    if score == ANSWER:
        return f"{pair['only_policy']}, {pair['only_other']}", pair["p"]
    found = known_score(pair, score)
    return difference_of(found), found["p"]


def _row(name: str, records: list[dict[str, Any]]) -> tuple[str, Row, str]:
    """Return the label of a row, the record that has it, and its policy."""
    policy, has_star = name.removesuffix("*"), name.endswith("*")
    if has_star >= len(records):
        raise ValueError(f"table: expected a second file for {name}, got one")
    return f"`{policy}`{' *' if has_star else ''}", records[has_star], policy


def rows_of(record: Row, policy: str, wanted: Row) -> dict[str, Row]:
    """Return a policy's rows by family, at the wanted budget and interval.

    Raises:
        ValueError: several budgets or intervals, and none is named.
    """
    rows: dict[str, Row] = {}
    for row in record["summary"]:
        if row["policy"] != policy:
            continue
        # FULL has neither; files of one interval say it in their settings.
        places = [] if policy == FULL else ["budget", "interval"]
        if any(row.get(key) != wanted.get(key, row.get(key)) for key in places):
            continue
        if row["family"] in rows:
            raise ValueError(
                f"table: expected budget and interval beside several of {policy}, got "
                f"{dict(wanted)}"
            )
        rows[row["family"]] = row
    return rows


def pair_of(record: Row, row: Row, against: str) -> Row | None:
    """Return the paired test of a pooled row, None without one.

    Args:
        against: `full`; `base` for the first of the row's other bases that the file
            has, see `pairs.bases_of`; the word of an allocator; or a policy.
    """
    bases = bases_of(row["policy"])
    kinds = {FULL: bases[:1], "base": bases[1:]}
    named = [b for b in bases if b == against or b.startswith(f"{against}-")]
    keys = ("policy", "budget", "interval", "family")
    found = {
        pair["against"]: pair
        for pair in record.get("pairs", ())
        if all(pair[key] == row[key] for key in keys)
    }
    others = kinds.get(against, named)
    return next((found[base] for base in others if base in found), None)
