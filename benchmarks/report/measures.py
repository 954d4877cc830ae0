"""Names the scores that figures draw."""

from dataclasses import dataclass

from benchmarks.accuracy.partial import LINES, PREFIX
from benchmarks.report.records import ANSWER, Row, known_score


@dataclass(frozen=True)
class Measure:
    """A score as figures name it.

    Attributes:
        stem: first word of the figures' files.
        title: what a title calls it.
        label: of its axis.
        point: what a point is.
        interval: method of its 95 % interval.
    """

    stem: str
    title: str
    label: str
    point: str
    interval: str


MEASURES = {
    ANSWER: Measure(
        "accuracy",
        "Accuracy",
        "answers right, %",
        "share of answers that are right",
        "Wilson",
    ),
    PREFIX: Measure(
        "prefix",
        "Correct prefix",
        "correct prefix, %",
        "share of the right trace before the first deviation, mean over questions",
        "bootstrap",
    ),
    LINES: Measure(
        "lines",
        "Right lines",
        "lines right, %",
        "share of the right trace's lines that stand in their place, mean over "
        "questions",
        "bootstrap",
    ),
}


def drawn(row: Row, score: str) -> Row:
    """Return a row whose `accuracy`, `low` and `high` are those of a score.

    Raises:
        ValueError: the row lacks the score.
    """
    if score == ANSWER:
        return row
    found = known_score(row, score)
    ends = {"low": found["low"], "high": found["high"]}
    return {**row, "accuracy": found["mean"], **ends}
