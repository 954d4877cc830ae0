"""Makes a table of values that are picked out of records, whatever these measure."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report.records import Row, check_keys, read

MIDDLES = ("mean", "median", "ratio", "growth")
"""What a value with an interval, `low` to `high`, is called."""
NONE = "-"


def by_row(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table with a row per server, policy or whatever a record has.

    A column's path leads to its value by the keys of mappings and the numbers of
    items, divided by ` | `, with the row's word in place of `{}`: `servers | {} |
    median | steps`. `*` stands for all items, whose median, lowest and highest value
    are shown; `key=value key=value` for the item of a list that has both. `PATH over
    PATH` is a ratio, and a last ` %` shows a share in per cent.

    Args:
        wanted: `columns`, heading to path; `rows`, label to word, or to [file, word];
            `file`, of rows that name none.

    Raises:
        ValueError: see `tables.fill`, or a row or a column without a value.
    """
    check_keys(wanted, {"rows", "columns"}, {"file"})
    columns: Mapping[str, str] = wanted["columns"]
    rows = []
    for label, named in wanted["rows"].items():
        file, word = named if isinstance(named, list) else (wanted["file"], named)
        record = read(folder / file, None)
        cells = [_cell(record, path, str(word)) for path in columns.values()]
        if set(cells) == {NONE}:
            raise ValueError(f"table: expected values of {word!r} in {file}, got none")
        rows.append([label, *cells])
    for place, name in enumerate(columns, 1):
        if all(row[place] == NONE for row in rows):
            raise ValueError(f"table: expected values of {name!r}, got none")
    return [["", *columns], *rows]


def _cell(record: Any, path: str, word: str) -> str:
    """Return the value of a path as text; a dash if the record has none."""
    path = path.replace("{}", word)
    show = _share if path.endswith(" %") else _number
    sides = [
        [v for v in _values(record, side.split(" | ")) if v is not None]
        for side in path.removesuffix(" %").split(" over ")
    ]
    values = sides[0]
    if len(sides) == 2:
        values = [ours / theirs for ours, theirs in zip(*sides, strict=True)]
    if not values:
        return NONE
    if len(values) > 1:
        values = [{"median": median(values), "low": min(values), "high": max(values)}]
    (value,) = values
    if not isinstance(value, Mapping):
        return show(value)
    middle = next(value[key] for key in MIDDLES if key in value)
    return f"{show(middle)} [{show(value['low'])}, {show(value['high'])}]"


def _values(node: Any, steps: list[str]) -> Iterator[Any]:
    """Yield what steps lead to."""
    if not steps:
        yield node
        return
    step, *rest = steps
    if isinstance(node, Mapping):
        found = (
            list(node.values()) if step == "*" else [node[step]] if step in node else []
        )
    elif "=" in step:
        wanted = [part.split("=") for part in step.split()]
        found = [
            item
            for item in node
            if all(str(item.get(key)) == value for key, value in wanted)
        ]
    else:
        found = list(node) if step == "*" else node[int(step) : int(step) + 1]
    for child in found:
        yield from _values(child, rest)


def _number(value: float) -> str:
    """Return a number: whole ones and those above 100 without decimals."""
    is_whole = float(value).is_integer() or abs(value) >= 100
    return f"{value:,.0f}" if is_whole else f"{value:#.3g}"


def _share(value: float) -> str:
    """Return a share in per cent."""
    return f"{100 * value:.{int(value < 0.0995)}f} %"
