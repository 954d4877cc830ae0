"""Tests of partial scores: how far an answer follows the right trace."""

import lzma

import pytest

from benchmarks import provenance
from benchmarks.accuracy import partial, results
from benchmarks.accuracy.questions import digest_of
from reasoner.problems import generate

ANSWERS = provenance.ROOT / "benchmarks" / "results" / "answers"
TRACE = generate("copy", 10, 3).trace


def line(text: str, **changes) -> dict:
    """Return a line of an output file with an answer to copy:10, number 3."""
    problem = generate("copy", 10, 3)
    digest = digest_of(problem.prompt, [problem.answer])
    return {"task": "copy:10", "id": "3", "digest": digest, "text": text, **changes}


def wrong(place: int) -> str:
    """Return the trace with another character at a place."""
    return f"{TRACE[:place]}~{TRACE[place + 1 :]}"


def test_a_right_trace_has_all_whatever_follows_it():
    for text in (TRACE, f"{TRACE}</think>\\boxed{{9}}", f"{TRACE}</think>;x;y"):
        assert partial.scores_of(line(text)) == {"prefix": 1.0, "lines": 1.0}


@pytest.mark.parametrize("place", [0, 1, 20, len(TRACE) - 1])
def test_one_wrong_character_ends_the_prefix_and_costs_a_line(place):
    found = partial.scores_of(line(wrong(place)))
    count = len(TRACE.split(";"))
    assert found == {"prefix": place / len(TRACE), "lines": (count - 1) / count}


def test_answers_to_another_question_are_refused():
    with pytest.raises(ValueError, match="copy:10 3 is another question than the one"):
        partial.scores_of(line(TRACE, digest="00000000"))


def test_a_question_is_the_mean_of_its_samples():
    samples = [line(TRACE, sample=0), line("", sample=1)]
    scores = partial.scores_by_question(samples)
    assert scores == {("copy:10", "3"): {"prefix": 0.5, "lines": 0.5}}
    assert partial.scores_by_question([*samples, line("", task="math500")]) is None


def test_right_answers_on_file_have_right_traces():
    """Full KV cache: nearly every right answer comes from a wholly right trace."""
    text = lzma.decompress((ANSWERS / "standard.jsonl.xz").read_bytes()).decode()
    _, lines = results.parse_file(ANSWERS, text)
    full = [one for one in lines if one["policy"] == "full"]
    right = [partial.scores_of(one) for one in full if one["correct"]]
    assert len(full) == 100
    assert right.count({"prefix": 1.0, "lines": 1.0}) >= 98
