"""Tests of what is taken for an answer, and of when two answers are equal."""

import pytest

from benchmarks.accuracy.answers import last_boxed, same_answer
from benchmarks.accuracy.questions import (
    ALL_IN_TEXT,
    ANY_IN_TEXT,
    EXACT,
    MATH,
    Question,
)
from benchmarks.accuracy.scoring import judge

# Text -> content of its last box.
BOXES = {
    # No box, or no content.
    "The answer is 7.": None,
    "boxed{7}": None,
    "\\boxedd{7}": None,
    "\\boxed 7": None,
    "\\boxed{  }": None,
    # One box.
    "\\boxed{ 7 }": "7",
    "\\boxed\n{7}": "7",
    "\\fbox{7}": "7",
    "\\boxed{7": None,
    "\\boxed{7\\}": None,
    # Several boxes.
    "\\boxed{1} \\boxed{2}": "2",
    "\\boxed{1} \\boxed{2": None,
    "\\boxed{1} \\boxed{}": None,
    "\\boxed{1 \\boxed{2}": "2",
    "\\boxed{1} \\boxed": "1",
    # Nested braces and boxes.
    "\\boxed{\\frac{\\sqrt{3}}{2}}": "\\frac{\\sqrt{3}}{2}",
    "\\boxed{x = \\boxed{7}}": "7",
    "\\boxed{\\{1, 2\\}}": "\\{1, 2\\}",
    "\\boxed{1 \\\\}": "1 \\\\",
}
SAME = [
    ("7.", "7"),
    ("$7$", "7"),
    ("7.0", "7"),
    (".5", "0.5"),
    ("\\frac{1}{2}", "1/2"),
    ("\\dfrac{1}{2}", "\\tfrac{1}{2}"),
    ("\\frac12", "\\frac{1}{2}"),
    ("-\\frac{1}{2}", "-0.5"),
    ("2\\frac{1}{2}", "2.5"),
    ("1,234", "1234"),
    ("10,\\!000", "10000"),
    ("5 \\text{ cm}^2", "5"),
    ("12 dollars", "\\$12"),
    ("90^{\\circ}", "90"),
    ("50\\%", "50"),
    ("x = 5", "5"),
    ("\\text{East}", "east"),
    ("(1, \\frac{1}{2})", "(1, 0.5)"),
    ("\\left( 1, 2 \\right)", "(1,2)"),
    ("x^2 + 1", "x^2+1"),
]
DIFFERENT = [
    ("7", "-7"),
    ("", "7"),
    ("0.3333", "\\frac{1}{3}"),
    ("\\frac{1}{0}", "0"),
    ("5 x", "5"),
    ("5 or 6", "5"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(2,1)"),
    ("1,2", "12"),
    ("x^2", "x2"),
    ("50", "0.5"),
    ("10^3", "10"),
]


@pytest.mark.parametrize(("text", "expected"), BOXES.items())
def test_the_last_box_counts(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize("pair", SAME + DIFFERENT)
def test_equal_answers(pair):
    for given, expected in (pair, pair[::-1]):
        assert same_answer(given, expected) == (pair in SAME)


def question(judged: str, *answers: str) -> Question:
    return Question("task", "0", "prompt", answers, judged, 1, 1)


def test_one_digit_has_to_be_exact():
    assert judge(question(EXACT, "5"), "\\boxed{5}", True).correct
    assert not judge(question(EXACT, "5"), "\\boxed{5.0}", True).correct
    assert not judge(question(EXACT, "5"), "5", True).correct


def test_latex_goes_to_math_verify_only_where_it_is_not_plainly_equal():
    seen = []

    def equal(given: str, expected: str) -> bool:
        seen.append((given, expected))
        return True

    one = question(MATH, "2x")
    assert judge(one, "\\boxed{2x}", True, equal).correct and seen == []
    assert judge(one, "\\boxed{x+x}", True, equal).correct and seen == [("x+x", "2x")]
    assert not judge(one, "\\boxed{x+x}", True).correct
    assert not judge(one, "x+x", True, equal).correct
    assert not judge(one, "\\boxed{x+x}", False, equal).correct and len(seen) == 1


def test_all_answers_have_to_be_found():
    two = question(ALL_IN_TEXT, "123", "AB")
    assert judge(two, "ab, and 123.", True).correct
    half = judge(two, "1234 ab", True)
    assert (half.correct, half.score) == (False, 0.5)
    assert judge(two, "ab, and 123.", False).score == 0


def test_any_answer_is_enough():
    names = question(ANY_IN_TEXT, "Ann Lee", "A. Lee")
    whole = judge(names, "ann lee", True)
    assert (whole.correct, whole.score) == (True, 1.0)
    longer = judge(names, "It was Ann Lee", True)
    assert longer.correct and longer.score == pytest.approx(2 * 2 / (4 + 2))
    assert not judge(names, "It was Ann", True).correct


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("x+x", "2x", True),
        ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}", True),
        ("\\frac{1}{3}", "\\frac{1}{4}", False),
    ],
)
def test_math_verify_knows_algebra(given, expected, same):
    pytest.importorskip("math_verify")
    from benchmarks.accuracy.scoring import math_verify

    _, equal = math_verify()
    assert equal(given, expected) is same
