"""Checks that sentences of the docs follow from rows of result files.

A comment behind a paragraph, a list or a table that is written by hand says where its
figures are from; it claims for everything since the heading or the comment before::

    <!-- from standard.json
    expected@192/256 lines = 62, 81 %; keydiff@192 lines = 22 [18, 27] %
    ams-expected@192 against expected lines = -19.2 points shown
    expected@192/256 lines > 60 %
    shown lines gains against base = ams-keydiff@128/192, ams-rkv@128
    shown answer = none
    from serving_pressure.json
    | ratios | ams-tova / stock | output_tok_s = 1.48 [1.40, 1.99]
    given 100, 64
    -->

* `ADDRESS = VALUES`: what `addresses` finds there, in order, rounded as the text rounds
  it; `>` and `<` hold for each. The unit `%` or `points` stands for a hundredth,
  `thousand` for a thousand. `shown` and `not shown` say whether p, after Holm's
  correction over the page's table of comparisons, is below 0.05.
* `shown SCORE [gains|losses] [of POLICIES] [against OTHER] = ROWS`: these and no other
  rows of that table are shown, of the named ones; `none` for none. OTHER is the table's
  column; `base` is any.
* The table is the first below the comment that has the file (and the row), or else the
  last above.
* `given`: numbers of the text that are settings, not results.

Statements are divided by line ends and `;`; a line that starts with a space goes on.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import addresses, pages, records, tables

SHOWN_BELOW = 0.05
SCALES = {"": 1, "%": 100, "points": 100, "thousand": 1e-3}
_N = rf"[+-]?{pages.NUMBER}"
VALUE = re.compile(rf"({_N})(?: \[({_N}), ({_N})\])?")
STATEMENT = re.compile(
    r"(?P<address>.+?) (?P<sign>[=<>]) (?P<values>[-+\d].*?)"
    r" ?(?P<unit>%|points|thousand|)(?P<shown> (?:not )?shown)?"
)
SET = re.compile(
    r"shown (?P<score>\w+)(?: (?P<side>gains|losses))?(?: of (?P<policies>\S+))?"
    r"(?: against (?P<other>\S+))? = (?P<rows>.+)"
)
NO_CLAIM = (
    "{number} has no claim; name its row in a comment behind it, `<!-- from FILE` "
    "(benchmarks/report/claims.py), or list it after `given` if it is a setting"
)

Table = list[dict[str, str]]
"""Rows of a table of comparisons: cells by column."""


@dataclass(frozen=True)
class Page:
    """A page of the docs.

    Attributes:
        text: Markdown.
        folder: folder of result files.
    """

    text: str
    folder: Path

    def comparisons(self, line: int, name: str) -> list[Table]:
        """Return the tables that have a file: those below a line, then upwards."""
        below, above = [], []
        for found in tables.BLOCK.finditer(self.text):
            wanted = yaml.safe_load(found[3])
            if found[2] == "comparisons" and wanted["files"] == [name]:
                header, *rows = tables.KINDS[found[2]](wanted, self.folder)
                keys = [column.partition(":")[0] for column in header]
                table = [dict(zip(keys, row, strict=True)) for row in rows]
                at = self.text.count("\n", 0, found.start()) + 1
                (below if at > line else above).append(table)
        return below + above[::-1]


def mistakes_of(text: str, folder: Path) -> list[str]:
    """Return what is wrong with the figures of a page, a sentence each.

    Args:
        text: the page.
        folder: folder of result files.
    """
    page = Page(text, folder)
    found = []
    for scope in pages.scopes_of(text):
        claimed: set[str] = set()
        known: set[str] = set()
        if scope.claims is not None:
            for name, statement in _statements(scope.claims):
                try:
                    figures, others = _checked(page, scope.line, name, statement)
                except ValueError as error:
                    found.append(f"line {scope.line}: {name}: {statement}: {error}")
                    continue
                claimed |= figures
                known |= others
        blocks = [block for block in scope.blocks if block.needs_claim]
        written = {number for block in scope.blocks for number in block.figures}
        found += [
            f"line {scope.line}: {number} is claimed, but the text above has it not"
            for number in sorted(claimed - written)
        ]
        for block in blocks:
            found += [
                f"line {block.line}: {NO_CLAIM.format(number=number)}"
                for number in dict.fromkeys(block.figures)
                if number not in claimed | known
            ]
    return found


def _statements(claims: str) -> Iterator[tuple[str, str]]:
    """Yield the statements of a comment, each with the name of its file."""
    name = ""
    for statement in re.split(r";|\n(?! )", claims):
        words = " ".join(statement.split())
        if words.startswith("from "):
            name, _, words = words.removeprefix("from ").partition(" ")
        if words:
            yield name, words


def _checked(
    page: Page, line: int, name: str, statement: str
) -> tuple[set[str], set[str]]:
    """Return the figures that a statement claims, and other numbers that it explains.

    Raises:
        ValueError: it does not hold, or cannot be read.
    """
    if statement.startswith("given "):
        return set(map(pages.plain, re.findall(pages.NUMBER, statement))), set()
    if found := SET.fullmatch(statement):
        _check_set(page.comparisons(line, name), found.groupdict())
        return set(), _settings(statement)
    found = STATEMENT.fullmatch(statement)
    if found is None:
        raise ValueError("expected `ADDRESS = VALUES`, `shown ... = ROWS` or `given N`")
    parts = found.groupdict(default="")
    values = addresses.values_of(addresses.read(name, page.folder), parts["address"])
    claimed = VALUE.findall(parts["values"])
    if parts["sign"] == "=":
        _check_equal(values, claimed, SCALES[parts["unit"]])
    else:
        _check_beyond(values, claimed, parts["sign"], SCALES[parts["unit"]])
    if parts["shown"]:
        rows = addresses.ROW.fullmatch(parts["address"])
        if rows is None or not rows["other"]:
            raise ValueError("only a row `against` another is shown")
        _check_shown(page.comparisons(line, name), rows, parts["shown"] == " shown")
    figures = {pages.plain(number) for value in claimed for number in value if number}
    others = _settings(parts["address"])
    return (figures, others) if parts["sign"] == "=" else (set(), others | figures)


def _settings(address: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", address))


def _check_equal(values: list[Any], claimed: list[Any], scale: float) -> None:
    """Raise ValueError unless values are those claimed, as the text rounds them."""
    if len(values) != len(claimed):
        shown = [addresses.middle_of(value) * scale for value in values[:20]]
        raise ValueError(f"claims {len(claimed)} values, the file has {shown}")
    for value, (middle, low, high) in zip(values, claimed, strict=True):
        pairs = [(addresses.middle_of(value), middle)]
        if low:
            pairs += [(value["low"], low), (value["high"], high)]
        for number, text in pairs:
            digits = len(text.partition(".")[2])
            if f"{number * scale:.{digits}f}" != text.lstrip("+").replace(",", ""):
                raise ValueError(f"claims {text}, the file has {number * scale:.6g}")


def _check_beyond(
    values: list[Any], claimed: list[Any], sign: str, scale: float
) -> None:
    """Raise ValueError unless all values are above, or below, the one claimed."""
    ((bound, _, _),) = claimed
    for value in values:
        number = addresses.middle_of(value) * scale
        is_above = number > float(bound)
        if is_above != (sign == ">") or number == float(bound):
            raise ValueError(f"claims {sign} {bound}, the file has {number:.6g}")


def _check_shown(found: list[Table], rows: re.Match[str], is_shown: bool) -> None:
    """Raise ValueError unless all rows of an address are shown, or none."""
    policies = rows["policies"].split("/")
    budgets = (rows["budgets"] or "").split("/")
    for policy in policies:
        for budget in budgets:
            for score in rows["fields"].split("/"):
                wanted = {"policies": policy, "other": rows["other"], "score": score}
                places = _places(found, wanted, budget)
                if len(places) != 1:
                    raise ValueError(f"no table below or above compares {policy}")
                if any(row["shown"] for row in places) != is_shown:
                    raise ValueError(
                        f"{policy}@{budget}: p is {places[0]['p']} in the table"
                    )


def _check_set(found: list[Table], wanted: Mapping[str, str | None]) -> None:
    """Raise ValueError unless the shown rows of the first table are those named."""
    places = _places(found[:1], wanted)
    if not places:
        raise ValueError("no table below or above has such rows")
    shown = {
        f"{row['policy']}@{row['budget']}"
        for row in places
        if row["shown"] and wanted["side"] in (None, row["side"])
    }
    named: set[str] = set()
    for word in str(wanted["rows"]).split(", "):
        policy, _, budgets = word.partition("@")
        base, _, variants = policy.partition(":")
        named |= {
            f"{base}:{variant}@{budget}".replace(":@", "@")
            for variant in variants.split("/")
            for budget in budgets.split("/")
            if budget
        }
    if shown != named:
        raise ValueError(f"shown are {', '.join(sorted(shown)) or 'none'}")


def _places(
    found: list[Table], wanted: Mapping[str, str | None], budget: str = ""
) -> list[dict[str, Any]]:
    """Return the wanted rows of the first table that has any, with p and side."""
    patterns = str(wanted.get("policies") or "*").split("/")
    other, score = wanted.get("other") or "base", str(wanted["score"])
    for table in found:
        places = [
            {"policy": policy, "budget": row["budget"], **_tested(row[score], score)}
            for row in table
            for policy in [row["policy"].strip("`")]
            if any(fnmatchcase(policy, pattern) for pattern in patterns)
            and (other == "base" or fnmatchcase(row["against"].strip("`"), other))
            and budget in ("", row["budget"])
        ]
        if places:
            return places
    return []


def _tested(cell: str, score: str) -> dict[str, Any]:
    """Return p of a cell, whether that is shown, and on which side."""
    text, _, p = cell.rpartition(", ")
    if score == records.ANSWER:
        ours, theirs = map(int, text.split(", "))
        is_gain = ours > theirs
    else:
        is_gain = text.startswith("+")
    side = "gains" if is_gain else "losses"
    return {"p": p, "shown": float(p) < SHOWN_BELOW, "side": side}
