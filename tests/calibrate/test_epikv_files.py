"""Traces on disk, and where answers begin and end."""

import json
from pathlib import Path

import pytest

from vllm_kvpolicy.calibrate.epikv_files import (
    PROBLEM_KEYS,
    answer_start,
    append,
    boxed_answer,
    read_lines,
    resume,
    same_answer,
)

TRACE = {"token_ids": [1, 2, 3], "prompt_len": 1}


def test_a_line_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    assert resume(path) == []
    append(path, [TRACE, {**TRACE, "correct": True}])
    whole = path.read_text()
    path.write_text(whole + json.dumps(TRACE)[:20])
    assert len(resume(path)) == 2
    assert path.read_text() == whole
    path.write_text(whole + json.dumps(TRACE))  # all there but the end of the line
    assert len(resume(path)) == 2
    append(path, [TRACE])
    assert read_lines(path)[1] == {**TRACE, "correct": True}
    assert len(read_lines(path)) == 3


@pytest.mark.parametrize("line", ["{", "[1]", '{"token_ids": [1]}'])
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(TRACE) + "\n" + line + "\n" + json.dumps(TRACE) + "\n")
    with pytest.raises(ValueError, match="line 2: .* token_ids and prompt_len"):
        resume(path)
    with pytest.raises(ValueError, match="line 1: .* problem and ground_truth"):
        read_lines(path, PROBLEM_KEYS)
    with pytest.raises(ValueError, match="cannot read"):
        read_lines(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{", None),
        (r"\boxed{a{b}", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_last_box_holds_the_answer(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def test_answers_agree_however_they_are_written() -> None:
    assert same_answer(r"\dfrac{1}{2}", r"\frac{1} {2}")
    assert same_answer("1,200", "1200.0")
    assert same_answer("$5$", "5.")
    assert not same_answer("5", "6")
    assert not same_answer("x", "y")
    assert not same_answer(None, "5")


@pytest.mark.parametrize(
    ("pieces", "start"),
    [
        (["p", "a", "</think>", "\n", " ", "7"], 5),
        (["p", "a", "</th", "ink>", "7", "8"], 4),
        (["p", "a", "x</think>7", "8"], 3),
        (["p", "</think>", "b", "</think>", "7"], 4),
        (["</think>", "a", "b", "so \\box", "ed{7}"], 3),
        (["p", "a", "b", "\\boxed{", "7}"], 3),
        (["p", "\\boxed{7}"], 2),
        (["p", "a", "</think>"], 3),
        (["p"] + ["a"] * 100, 37),
        (["p", "a", "b"], 2),
        (["p"], 1),
    ],
)
def test_where_the_answer_begins(pieces: list[str], start: int) -> None:
    assert answer_start(pieces, 1) == start
