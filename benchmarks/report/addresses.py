"""Finds the values that a claim names in a result file.

Two kinds of addresses::

    expected@192/256 in copy:48 lines
    ams-tova@128 against tova lines
    | ratios | ams-tova / stock | output_tok_s
    | checks | ok=True count

The first kind names rows of `summary`, by policy, budgets and families (all tasks
together if none is named), and a field of each; with `against` it names paired tests,
as the tables of comparisons do. Policies, budgets, families and fields may be several,
divided by `/`, and policies may be patterns (`ams-*`). A field may go on with steps.

The second kind goes from the top of the file by steps: a key, the number of an item,
`*` for all of them, or `key=value` for the items of a list that have it (`!=` for those
that have not; several are divided by spaces).

`ADDRESS over ADDRESS` are ratios. A last word takes one value of all: `count`,
`lowest`, `median`, `highest`.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import packed, provenance
from benchmarks.accuracy.groups import POOLED
from benchmarks.report.policy_tables import pair_of
from benchmarks.report.records import ANSWER, Row

ROW = re.compile(
    r"(?P<policies>[^\s@|]+)(?:@(?P<budgets>[\d/]+))?(?: in (?P<families>\S+))?"
    r"(?: against (?P<other>\S+))? (?P<fields>[^|]+?)(?P<steps>(?: \| .+)?)"
)
MIDDLES = ("mean", "median", "ratio", "margin", "accuracy")
"""What a value with an interval, `low` to `high`, is called."""
GATHERED: Mapping[str, Callable[[Sequence[Any]], float]] = {
    "count": len,
    "lowest": min,
    "median": median,
    "highest": max,
}


def read(name: str, folder: Path) -> Any:
    """Return a result file of a folder, or the header of a checked-in safetensors file.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / name
    try:
        if path.suffix != ".safetensors":
            return json.loads(packed.read_text(path))
        content = (provenance.ROOT / name).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        return json.loads(content[8 : 8 + size])
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {name}: {error}") from None


def values_of(record: Any, address: str) -> list[Any]:
    """Return the values that an address names: numbers, or mappings with an interval.

    Raises:
        ValueError: an invalid address, or one that names nothing.
    """
    path, _, last = address.rpartition(" ")
    if last in GATHERED:
        found = values_of(record, path) if path != "|" else [record]
        if last == "count":
            return [len(found)]
        return [GATHERED[last]([middle_of(value) for value in found])]
    if " over " in address:
        sides = [values_of(record, side) for side in address.split(" over ")]
        return [middle_of(a) / middle_of(b) for a, b in zip(*sides, strict=True)]
    if address.startswith("| "):
        found = _walk([record], address[2:].split(" | "))
    elif parts := ROW.fullmatch(address):
        found = list(_fields_of(record, parts.groupdict()))
    else:
        raise ValueError("expected `POLICY[@BUDGET] FIELD` or `| STEP | STEP`")
    if not found:
        raise ValueError("names nothing in this file")
    return found


def middle_of(value: Any) -> float:
    """Return a number, or that in the middle of an interval.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in MIDDLES if key in value), None)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"names {value!r}, which is no number") from None


def ends_of(value: Any) -> tuple[float, float]:
    """Return the ends of an interval.

    Raises:
        ValueError: the value has none.
    """
    if not isinstance(value, Mapping) or value.get("low") is None:
        raise ValueError(f"names {value!r}, which has no interval")
    return float(value["low"]), float(value["high"])


def _fields_of(record: Row, parts: Mapping[str, str | None]) -> Iterator[Any]:
    """Yield the fields of the rows that an address of the first kind names."""
    steps = (parts["steps"] or "").split(" | ")[1:]
    fields = str(parts["fields"]).split("/")
    for row in _rows_of(record, parts):
        against = parts["other"]
        found = pair_of(record, row, against) if against else row
        if found is None:
            raise ValueError(f"no test of {row['policy']} against {against}")
        for name in fields:
            if name == ANSWER and not against:
                yield from _walk([{name: found}], [name, *steps])
            else:
                yield from _walk([found], [name, *steps])


def _rows_of(record: Row, parts: Mapping[str, str | None]) -> Iterator[Row]:
    """Yield the rows of an address, policy by policy, budget by budget."""
    if not isinstance(record, Mapping) or "summary" not in record:
        raise ValueError("this file has no `summary`: name steps")
    choices = [str(parts[key] or "*").split("/") for key in ("policies", "budgets")]
    families = (parts["families"] or POOLED).split("/")
    for policy, budget, family in product(*choices, families):
        found = [
            row
            for row in record["summary"]
            if fnmatchcase(row["policy"], policy)
            and fnmatchcase(str(row["budget"]), budget)
            and fnmatchcase(row["family"], family)
        ]
        if not found:
            raise ValueError(f"no row {policy}@{budget} in {family}")
        if "*" not in policy + family and budget == "*" and len(found) > 1:
            raise ValueError(f"{policy} has several budgets: name them with @")
        yield from found


def _walk(nodes: list[Any], steps: Sequence[str]) -> list[Any]:
    """Return what steps lead to from some nodes."""
    for step in steps:
        nodes = [child for node in nodes for child in _step(node, step)]
    return nodes


def _step(node: Any, step: str) -> list[Any]:
    """Return the children of a node that a step names."""
    if isinstance(node, Mapping) and step in node:
        return [node[step]]
    if step == "*" and isinstance(node, Mapping | list):
        return list(node.values() if isinstance(node, Mapping) else node)
    if isinstance(node, list) and "=" in step:
        return [child for child in node if _has(child, step)]
    if isinstance(node, list) and step.isdigit() and int(step) < len(node):
        return [node[int(step)]]
    raise ValueError(f"no step {step!r} in this file")


def _has(row: Row, step: str) -> bool:
    """Return whether a row has the values of a step."""
    for part in step.split():
        key, _, value = part.partition("=")
        is_wanted = not key.endswith("!")
        if (str(row.get(key.removesuffix("!"))) == value) != is_wanted:
            return False
    return True
