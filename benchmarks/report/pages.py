"""Cuts a page of the docs into blocks of text and the comments that claim for them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.report import tables

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
FIGURE = re.compile(rf"(?<![\w.\-/])-?({NUMBER})(?!\w|\.\d)")
QUALITY = re.compile(
    r"%|per cent|\bpoints?\b|\bright\b(?! after)|\blines\b|\baccura|\bnats\b"
    r"|\blog-loss\b|\bloss (?:was|fell|rose)\b"
    r"|\bp (?:=|is|below|above|under)|\d x(?![\w`])|\bx stock|\d \[[-\d]",
    re.IGNORECASE,
)
"""What a block with a digit has if it speaks of quality or speed."""
_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+")
_LEVEL = re.compile(r"\b95 %(?=\]| Wilson| paired| bootstrap| interval)")
_START = re.compile(r"^\s*(?:[*-]|\d+\.) ")
_CLAIM, _EXEMPT = "from ", "no figure: "


@dataclass
class Block:
    """A paragraph, a list item, or a table that is written by hand.

    Attributes:
        line: number of its first line.
        text: without code and addresses of links.
        is_exempt: whether a comment says why it needs no claim.
    """

    line: int
    text: str
    is_exempt: bool = False

    @property
    def figures(self) -> list[str]:
        """The numbers in it, without signs and separators of thousands."""
        return [plain(number) for number in FIGURE.findall(self.text)]

    @property
    def needs_claim(self) -> bool:
        """Whether it speaks of quality or speed in numbers."""
        has_figures = bool(self.figures) and bool(QUALITY.search(self.text))
        return has_figures and not self.is_exempt


@dataclass
class Scope:
    """Blocks, and the comment behind them that claims for all of them.

    Attributes:
        blocks: since the heading or the comment before.
        claims: text of the comment, without its marks; None if the section ends first.
        line: number of the comment's first line.
    """

    blocks: list[Block] = field(default_factory=list)
    claims: str | None = None
    line: int = 0


def plain(number: str) -> str:
    """Return a number as written, without its sign and separators of thousands."""
    return number.lstrip("+-").replace(",", "")


def scopes_of(page: str) -> Iterator[Scope]:
    """Yield the scopes of a page in order; generated tables and code are left out."""
    scope = Scope()
    for number, kind, text in _parts(_without(page, tables.BLOCK)):
        if kind == "text":
            scope.blocks.append(Block(number, _words(text)))
        elif kind == "comment" and text.startswith(_EXEMPT) and scope.blocks:
            scope.blocks[-1].is_exempt = True
        elif kind == "comment" and text.startswith(_CLAIM):
            scope.claims, scope.line = text, number
        if kind == "heading" or scope.claims is not None:
            yield scope
            scope = Scope()
    yield scope


def _words(text: str) -> str:
    """Return a block without code, addresses of links and levels of intervals."""
    return _LEVEL.sub(" ", " ".join(_CODE.sub(" ", _START.sub("", text)).split()))


def _without(page: str, pattern: re.Pattern[str]) -> str:
    """Return a page with matches blanked; lines keep their numbers."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), page)


def _parts(page: str) -> Iterator[tuple[int, str, str]]:
    """Yield first line, kind and text: of kind "text", "heading" or "comment"."""
    held: list[str] = []
    start, is_code, is_comment = 0, False, False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        words = line.strip()
        is_indented = line.startswith("    ") and not held
        is_text = not is_comment and not is_code and not is_indented
        opens = is_text and words.startswith("<!--")
        is_fence = words.startswith("```") and not is_comment
        is_heading = line.startswith("#") and not is_code and not is_comment
        is_row = words.startswith("|")
        is_new = bool(_START.match(line)) or bool(held) and is_row != _is_row(held)
        ends = not words or opens or is_fence or is_heading or is_new
        if held and not is_comment and ends:
            yield start, "text", "\n".join(held)
            held = []
        is_comment |= opens
        if is_comment:
            start = number if opens else start
            held.append(line)
            if "-->" in line:
                text = "\n".join(held).strip()
                yield (
                    start,
                    "comment",
                    text.removeprefix("<!--").partition("-->")[0].strip(),
                )
                held, is_comment = [], False
        elif is_fence:
            is_code = not is_code
        elif is_heading:
            yield number, "heading", words
        elif words and not is_code and not is_indented:
            start = start if held else number
            held.append(line)


def _is_row(held: list[str]) -> bool:
    return held[-1].strip().startswith("|")
