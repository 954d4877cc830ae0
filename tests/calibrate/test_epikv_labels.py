"""Labels follow from what a model answers once tokens are written over."""

from pathlib import Path

import pytest

from vllm_kvpolicy.calibrate.epikv_files import append, read_lines
from vllm_kvpolicy.calibrate.epikv_labels import Windows, label, label_all

FILL, KEY, THINK_END = 0, 77, 99
PROMPT, BODY = 5, 70


def make_trace(key_at: int, seed: int = 0) -> dict:
    """A trace whose answer depends on one token, `key_at` tokens into the body."""
    body = [10 + (seed + index) % 50 for index in range(BODY)]
    body[key_at] = KEY
    return {
        "token_ids": [1] * PROMPT + body + [THINK_END, 3, 4],
        "prompt_len": PROMPT,
        "ground_truth": "7",
    }


def pieces_of(tokens: list[int]) -> list[str]:
    return ["</think>" if token == THINK_END else "x" for token in tokens]


class Model:
    """Answers 7 if the key is in the context; remembers what it was asked."""

    def __init__(self) -> None:
        self.contexts: list[list[int]] = []

    def __call__(self, contexts: list[list[int]]) -> list[str]:
        self.contexts += contexts
        return [f"\\boxed{{{7 if KEY in tokens else 8}}}" for tokens in contexts]


WINDOWS = Windows(token=FILL)


@pytest.mark.parametrize("key_at", [0, 20, 33, 69])
def test_tokens_of_windows_that_change_the_answer(key_at: int) -> None:
    trace, model = make_trace(key_at), Model()
    made = label(trace, pieces_of(trace["token_ids"]), WINDOWS, model)
    end = PROMPT + BODY + 1
    spans = [range(s, min(s + 32, end)) for s in range(PROMPT, end, 16)]
    important = {i for span in spans if PROMPT + key_at in span for i in span}
    want = [1] * PROMPT + [int(i in important) for i in range(PROMPT, end)] + [-1, -1]
    assert made["importance"] == want
    changed = sum(PROMPT + key_at in span for span in spans)
    assert made["label_stats"] == {
        "answer_start": end,
        "filler": "eos",
        "windows": len(spans),
        "changed": changed,
    }
    assert trace.items() <= made.items()


def test_contexts_differ_in_their_window_alone() -> None:
    trace, model = make_trace(20), Model()
    label(trace, pieces_of(trace["token_ids"]), WINDOWS, model)
    end = PROMPT + BODY + 1
    for number, context in enumerate(model.contexts):
        start = PROMPT + 16 * number
        want = trace["token_ids"][:end]
        want[start : start + 32] = [FILL] * len(want[start : start + 32])
        assert context == want


def test_random_fillers_are_the_same_in_each_run() -> None:
    windows = Windows(filler="random", vocabulary=range(200, 300))
    tokens, span = list(range(100)), range(16, 48)
    filled = windows.without(tokens, span, 90)
    assert filled == windows.without(tokens, span, 90)
    assert filled[:16] + filled[48:] == tokens[:16] + tokens[48:90]
    assert len(set(filled[16:48])) > 20
    assert min(filled[16:48]) >= 200
    assert filled[16:48] != windows.without(tokens, range(32, 64), 90)[32:64]


def test_goes_on_where_it_stopped(tmp_path: Path) -> None:
    output = tmp_path / "labels.jsonl"
    wrong = {**make_trace(3, seed=9), "correct": False}
    traces = [make_trace(3, seed=1), wrong, make_trace(3, seed=2)]
    first = Model()
    assert label_all(traces[:2], output, WINDOWS, pieces_of, first) == 1
    second = Model()
    assert label_all(traces, output, WINDOWS, pieces_of, second) == 1
    made = read_lines(output)
    assert [line["token_ids"] for line in made] == [
        traces[0]["token_ids"],
        traces[2]["token_ids"],
    ]
    assert len(first.contexts) == len(second.contexts) == 5
    assert label_all(traces, output, WINDOWS, pieces_of, second) == 0


def test_what_was_labelled_survives_a_crash(tmp_path: Path) -> None:
    output = tmp_path / "labels.jsonl"
    append(output, [])

    def fails_at_the_second(contexts: list[list[int]]) -> list[str]:
        if read_lines(output):
            raise RuntimeError("out of memory")
        return Model()(contexts)

    traces = [make_trace(3, seed=seed) for seed in range(3)]
    with pytest.raises(RuntimeError, match="out of memory"):
        label_all(traces, output, WINDOWS, pieces_of, fails_at_the_second)
    assert len(read_lines(output)) == 1
