"""Checks that sentences of the docs follow from rows of result files.

A comment behind a paragraph, a list or a table that is written by hand says where its
figures are from; it claims for everything since the heading or the comment before::

    <!-- from standard.json.xz
    expected@192/256 lines = 62, 81 %; keydiff@192 lines = 22 [18, 27] %
    ams-expected@192 against expected lines = -19.2 points shown
    expected@192/256 lines > 60 %
    shown lines gains against base = ams-keydiff@128/192, ams-rkv@128
    shown answer = none
    from serving_pressure.json.xz
    | ratios | ams-tova / stock | output_tok_s = 1.48 [1.40, 1.99]
    from language.json
    table ams-tova | budget 512 = +0.140 [0.121, 0.160]
    given 100, 64
    -->

* `ADDRESS = VALUES`: what `addresses` finds there, in order, rounded as the text rounds
  it; `>` and `<` hold for each. The unit `%` or `points` stands for a hundredth,
  `thousand` for a thousand. `shown` and `not shown` say whether p, after Holm's
  correction over the page's table of comparisons, is below 0.05.
* `shown SCORE [gains|losses] [of POLICIES] [against OTHER] = ROWS`: these and no other
  rows of that table are shown, of the named ones; `none` for none. OTHER is the table's
  column; `base` is any.
* `table CELL | HEADING`: cells of a generated table of the page, by the first cells of
  their row and the beginning of the column's heading.
* The table is the first below the comment that has the file and the row, or else the
  last above.
* `given`: numbers of the text that are settings, not results.

A number that is claimed twice stands in the text twice.

Statements are divided by line ends and `;`; a line that starts with a space goes on.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.report import addresses, pages
from benchmarks.report.page_tables import Page

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


def mistakes_of(text: str, folder: Path) -> list[str]:
    """Return what is wrong with the figures of a page, a sentence each.

    Args:
        text: the page.
        folder: folder of result files.
    """
    page = Page(text, folder)
    return [
        mistake for scope in pages.scopes_of(text) for mistake in _mistakes(page, scope)
    ]


def _mistakes(page: Page, scope: pages.Scope) -> Iterator[str]:
    """Yield what is wrong with the figures of a scope."""
    claimed: Counter[str] = Counter()
    known: set[str] = set()
    for name, statement in _statements(scope.claims or ""):
        try:
            figures, others = _checked(page, scope.line, name, statement)
        except ValueError as error:
            yield f"line {scope.line}: {name}: {statement}: {error}"
            figures, others = [], _numbers(statement)
        claimed.update(figures)
        known |= others
    written = Counter(number for block in scope.blocks for number in block.figures)
    for number in sorted(claimed - written):
        yield f"line {scope.line}: {number} is claimed more often than the text has it"
    for block in scope.blocks:
        if block.needs_claim:
            for number in dict.fromkeys(block.figures):
                if number not in claimed and number not in known:
                    yield f"line {block.line}: {NO_CLAIM.format(number=number)}"


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
) -> tuple[list[str], set[str]]:
    """Return the figures that a statement claims, and other numbers that it explains.

    Raises:
        ValueError: it does not hold, or cannot be read.
    """
    if statement.startswith("given "):
        return sorted(_numbers(statement)), set()
    if found := SET.fullmatch(statement):
        _check_set(page, line, name, found.groupdict())
        return [], _numbers(statement)
    found = STATEMENT.fullmatch(statement)
    if found is None:
        raise ValueError("expected `ADDRESS = VALUES`, `shown ... = ROWS` or `given N`")
    parts = found.groupdict(default="")
    address, scale = parts["address"], SCALES[parts["unit"]]
    if address.startswith("table "):
        cells = page.cells(line, name, address.removeprefix("table ").split(" | "))
        values = [_value_of(cell) for cell in cells]
    else:
        values = addresses.values_of(addresses.read(name, page.folder), address)
    claimed = VALUE.findall(parts["values"])
    if parts["sign"] == "=":
        _check_equal(values, claimed, scale)
    else:
        _check_beyond(values, claimed, parts["sign"], scale)
    if parts["shown"]:
        _check_shown(page, line, name, address, parts["shown"] == " shown")
    figures = [pages.plain(number) for value in claimed for number in value if number]
    known = _numbers(address)
    return (figures, known) if parts["sign"] == "=" else ([], known | set(figures))


def _numbers(text: str) -> set[str]:
    return set(map(pages.plain, re.findall(pages.NUMBER, text)))


def _value_of(cell: str) -> Any:
    """Return the number of a cell, with its interval if it has one.

    Raises:
        ValueError: it begins with none.
    """
    found = VALUE.match(cell)
    if found is None:
        raise ValueError(f"the table has {cell!r}, which is no number")
    middle, low, high = (part and part.replace(",", "") for part in found.groups())
    return {"mean": middle, "low": low, "high": high} if low else middle


def _check_equal(values: list[Any], claimed: list[Any], scale: float) -> None:
    """Raise ValueError unless values are those claimed, as the text rounds them."""
    if len(values) != len(claimed):
        found = [addresses.middle_of(value) * scale for value in values[:20]]
        raise ValueError(f"claims {len(claimed)} values, the file has {found}")
    for value, (middle, *ends) in zip(values, claimed, strict=True):
        pairs = [(addresses.middle_of(value), middle)]
        if ends[0]:
            pairs += zip(addresses.ends_of(value), ends, strict=True)
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
        number, limit = addresses.middle_of(value) * scale, float(bound)
        if number <= limit if sign == ">" else number >= limit:
            raise ValueError(f"claims {sign} {bound}, the file has {number:.6g}")


def _check_shown(
    page: Page, line: int, name: str, address: str, is_shown: bool
) -> None:
    """Raise ValueError unless all rows of an address are shown, or none."""
    rows = addresses.ROW.fullmatch(address)
    if rows is None or not rows["other"]:
        raise ValueError("only a row `against` another is shown")
    parts = [(rows[key] or "").split("/") for key in ("policies", "budgets", "fields")]
    for policy, budget, score in product(*parts):
        wanted = {"policies": policy, "other": rows["other"], "score": score}
        for test in page.tests(line, name, wanted | {"budget": budget or None}):
            if test["is_shown"] != is_shown:
                raise ValueError(f"{test['place']}: p is {test['p']} in the table")


def _check_set(
    page: Page, line: int, name: str, wanted: Mapping[str, str | None]
) -> None:
    """Raise ValueError unless the shown rows of a table are those named."""
    shown = {
        test["place"]
        for test in page.tests(line, name, {**wanted, "budget": None})
        if test["is_shown"] and wanted["side"] in (None, test["side"])
    }
    named: set[str] = set()
    for word in str(wanted["rows"]).split(", "):
        policy, _, budgets = word.partition("@")
        base, _, variants = policy.partition(":")
        named |= {
            f"{base}:{variant}@{budget}".replace(":@", "@")
            for variant, budget in product(variants.split("/"), budgets.split("/"))
            if budget
        }
    if shown != named:
        raise ValueError(f"shown are {', '.join(sorted(shown)) or 'none'}")
