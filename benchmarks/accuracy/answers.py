r"""Finds the last `\boxed{...}` of a text and compares answers.

Two answers are equal if, without units, dollar signs and LaTeX spacing, they are the
same text or the same rational number; tuples and sets are compared part by part.
Algebra is left to `math-verify`.
"""

import re
from fractions import Fraction

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_WHOLE_NUMBER = re.compile(_NUMBER)
_RATIO = re.compile(rf"({_NUMBER})/({_NUMBER})")
_LATEX_RATIO = re.compile(rf"([-+]?)(\d*)\\frac\{{({_NUMBER})\}}\{{({_NUMBER})\}}")
_GROUPED = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_SHORT_FRAC = re.compile(r"\\frac(\d)(\d)")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox|mathbf)\s*\{([^{}]*)\}")
_UNIT_AFTER_NUMBER = re.compile(
    rf"^(\$?{_NUMBER}|[-+]?\d*\\frac\{{{_NUMBER}\}}\{{{_NUMBER}\}})"
    r"(?:\s*\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?"
    r"|\s+(?!(?:and|or)\b)[A-Za-z]{2,}(?:\s+[A-Za-z]+)*(?:\^\{?[23]\}?)?)$"
)
_ASSIGNMENT = re.compile(r"^[A-Za-z]\s*=\s*")
_DELETED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\q?quad|\\displaystyle"
    r"|\^\{?\s*\\circ\s*\}?|\\degrees?(?![a-z])|\\?%|\\?\$|~"
)
_OPEN, _CLOSE = "([{", ")]}"


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` of a text holds, without outer white space.

    Braces nest; `\{` and `\}` are ordinary characters. Of nested boxes the inner one
    counts. If the last box is not closed there is no answer, even with earlier boxes.

    Returns:
        None without a box, or if the last one is empty or not closed.
    """
    starts = [found.end() for found in BOX.finditer(text)]
    if not starts:
        return None
    end = _closing_brace(text, starts[-1])
    content = None if end is None else text[starts[-1] : end].strip()
    return content or None


def _closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the one just before `start`."""
    depth, place = 1, start
    while place < len(text):
        if text[place] == "\\":
            place += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return place
        place += 1
    return None


def normal_form(answer: str) -> str:
    """Return an answer without units, dollar signs and spacing; also used for votes."""
    text = answer.strip().rstrip(".").strip()
    for mark in ("$$", "$"):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text.removeprefix(mark).removesuffix(mark).strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing):
            text = text[2:-2].strip()
    text = _ASSIGNMENT.sub("", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = _SHORT_FRAC.sub(r"\\frac{\1}{\2}", text)
    text = _DELETED.sub("", text).replace(r"\{", "{").replace(r"\}", "}").strip()
    if _GROUPED.fullmatch(text.replace(" ", "")):
        text = text.replace(" ", "").replace(",", "")
    unit = _UNIT_AFTER_NUMBER.match(text)
    text = unit.group(1) if unit else text
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    return text.casefold() if text.isalpha() else text


def same_answer(given: str, expected: str) -> bool:
    """Return whether two answers are plainly equal."""
    return _same(normal_form(given), normal_form(expected))


def _same(given: str, expected: str) -> bool:
    if given == expected:
        return True
    first, second = number(given), number(expected)
    if first is not None and second is not None:
        return first == second
    ours, theirs = _parts(given), _parts(expected)
    if len(ours) != len(theirs) or len(ours) < 2:
        return False
    return all(map(_same, ours, theirs))


def number(text: str) -> Fraction | None:
    """Return a normal form as a rational number, None if it is not one."""
    if _WHOLE_NUMBER.fullmatch(text):
        return Fraction(text)
    ratio = _RATIO.fullmatch(text)
    if ratio and Fraction(ratio[2]):
        return Fraction(ratio[1]) / Fraction(ratio[2])
    mixed = _LATEX_RATIO.fullmatch(text)
    if mixed and Fraction(mixed[4]):
        value = Fraction(mixed[2] or 0) + Fraction(mixed[3]) / Fraction(mixed[4])
        return -value if mixed[1] == "-" else value
    return None


def _parts(text: str) -> list[str]:
    """Split a tuple, set or list at its top-level commas; brackets are parts."""
    parts, depth = [""], 0
    outer = len(text) > 1 and text[0] in _OPEN and text[-1] in _CLOSE
    body = text[1:-1] if outer else text
    for character in body:
        depth += (character in _OPEN) - (character in _CLOSE)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [text[0], *parts, text[-1]] if outer and len(parts) > 1 else parts
