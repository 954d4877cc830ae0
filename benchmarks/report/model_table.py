"""Makes the table of the packaged model's accuracy with its full cache."""

from pathlib import Path

from benchmarks.report.records import Row, check_keys, read


def by_size(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table with a row per family and columns by size.

    Args:
        wanted: `file`.
    """
    check_keys(wanted, {"file"}, set())
    scores = read(folder / wanted["file"], "scores")["scores"]
    header = ["family", "trace tokens", "trained sizes, % right"]
    header += ["beyond them", "held-out template"]
    rows = []
    for family in dict.fromkeys(row["family"] for row in scores):
        own = [row for row in scores if row["family"] == family]
        sizes = [row for row in own if row["kind"] == "trained"]
        cells = [f"`{family}`", ", ".join(str(row["trace_tokens"]) for row in sizes)]
        cells += [
            "; ".join(_share(row) for row in own if row["kind"] == kind) or "-"
            for kind in ("trained", "longer", "template")
        ]
        rows.append(cells)
    return [header, *rows]


def _share(row: Row) -> str:
    share, low, high = row["correct"] / row["problems"], row["low"], row["high"]
    return (
        f"{row['lines']} lines: {100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"
    )
