"""Makes the tables of policies: the share of problems that each gets right."""

from pathlib import Path
from typing import Any

from benchmarks.accuracy.groups import POOLED
from benchmarks.accuracy.servers import FULL
from benchmarks.accuracy.summary import bases_of
from benchmarks.report.records import Row, check_keys, read, share_of

OPTIONS = {"budget", "interval", "against"}


def by_family(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table with the families of the first file as columns.

    Args:
        wanted: `files`, `rows`; `budget` and `interval`, by default the only ones;
            `against`, optional: paired test, see `pair_of`.
        folder: folder of the files.

    Raises:
        ValueError: see `tables.fill`.
    """
    check_keys(wanted, {"files", "rows"}, OPTIONS)
    records = [read(folder / name) for name in wanted["files"]]
    families = list(dict.fromkeys(row["family"] for row in records[0]["summary"]))
    families.remove(POOLED)
    families += [POOLED] if len(families) > 2 else []
    header = ["policy", *families, "answers cut off", *_against(wanted)]
    rows = []
    for name in wanted["rows"]:
        label, record, policy = _row(name, records)
        found = rows_of(record, policy, wanted)
        missing = [family for family in [*families, POOLED] if family not in found]
        if missing:
            raise ValueError(
                f"table: expected {missing} of {policy} in {wanted['files']}, got "
                "none; choose another budget, interval or row"
            )
        cells = [label, *(share_of(found[family]) for family in families)]
        cells.append(f"{100 * found[POOLED]['capped']:.0f} %")
        if against := wanted.get("against"):
            cells.append(pair_of(record, found[POOLED], against))
        rows.append(cells)
    return [header, *rows]


def by_budget(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of all tasks together, with the first file's budgets as columns.

    Args:
        wanted: `files`, `rows`; `interval`, by default the only one; `against`,
            optional: paired test at the `budget` named, or at each of a list, see
            `pair_of`.
        folder: folder of the files.

    Raises:
        ValueError: see `tables.fill`.
    """
    check_keys(wanted, {"files", "rows"}, OPTIONS)
    records = [read(folder / name) for name in wanted["files"]]
    budgets = sorted({r["budget"] for r in records[0]["summary"]} - {None})
    named = wanted.get("budget") if "against" in wanted else []
    tests = named if isinstance(named, list) else [named]
    if not set(tests) <= set(budgets) or ("against" in wanted and not tests):
        raise ValueError(
            f"table: expected a budget of {budgets} beside against, got {dict(wanted)}"
        )
    header = ["policy", *map(str, budgets)]
    for budget in tests:
        header += _against({**wanted, "budget": budget})
    rows = []
    for name in wanted["rows"]:
        label, record, policy = _row(name, records)
        by_place = {
            budget: rows_of(record, policy, {**wanted, "budget": budget}).get(POOLED)
            for budget in budgets
        }
        if not any(by_place.values()):
            raise ValueError(f"table: expected {policy} in {wanted['files']}, got none")
        cells = [label]
        cells += [share_of(row) if row else "-" for row in by_place.values()]
        for budget in tests:
            tested = by_place[budget]
            found = pair_of(record, tested, wanted["against"]) if tested else "-"
            cells.append(found)
        rows.append(cells)
    return [header, *rows]


def _against(wanted: Row) -> list[str]:
    against = wanted.get("against")
    where = f" at {wanted['budget']}" if "budget" in wanted else ""
    return [f"against {against}{where}: right alone, wrong alone, p"] if against else []


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


def pair_of(record: Row, row: Row, against: str) -> str:
    """Return the paired test of a pooled row; a dash without one.

    Args:
        record: the result file.
        row: a row of it.
        against: `full`; `base` for the policy without its variant or, where it has
            none, for the scorer without an allocator; or the word of an allocator.
    """
    bases = bases_of(row["policy"])
    kinds = {FULL: bases[:1], "base": bases[1:2]}
    others = kinds.get(against, [b for b in bases if b.startswith(f"{against}-")])
    for pair in record.get("pairs", ()):
        keys = ("policy", "budget", "interval", "family")
        same = all(pair[key] == row[key] for key in keys)
        if same and pair["against"] in others:
            return f"{pair['only_policy']}, {pair['only_other']}, {pair['p']:.2g}"
    return "-"
