"""Makes the table of page-table layouts."""

from pathlib import Path

from benchmarks.report.records import Row, check_keys, read

MIB = 2**20
HEADER = (
    *("superblocks", "loaded per step", "kept / loaded", "kept / held", "tables, MiB"),
    "copied per event",
)


def by_layout(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table with a row per layout and page size; tokens are per head.

    Args:
        wanted: `file`; `tokens` per request; `rows`, a mapping from labels to the name
            of a layout and the tokens of a page.
    """
    check_keys(wanted, {"file", "tokens", "rows"}, set())
    record = read(folder / wanted["file"], "results")
    table = [["layout", "page", *HEADER]]
    for label, (name, page) in wanted["rows"].items():
        place = {"tokens": wanted["tokens"], "page": page}
        found = [row for row in record["results"] if row.items() >= place.items()]
        if len(found) != 1 or name not in found[0]["layouts"]:
            raise ValueError(f"table: expected one {name!r} at {place}, got {found}")
        table.append([label, str(page), *cells(found[0], found[0]["layouts"][name])])
    return table


def cells(row: Row, layout: Row) -> list[str]:
    """Return what a layout takes, see HEADER; tokens are per head."""
    heads = row["layers"] * row["heads"]
    loaded, copied = (round(layout[key] / heads) for key in ("loaded", "rewritten"))
    size = layout["table_bytes"] / MIB
    return [
        str(layout["superblocks"]),
        str(loaded),
        f"{100 * layout['kept'] / layout['loaded']:.1f} %",
        f"{100 * layout['kept'] / layout['held']:.1f} %",
        f"{size:.1f}" if size >= 0.1 else f"{size:.2f}",
        str(copied),
    ]
