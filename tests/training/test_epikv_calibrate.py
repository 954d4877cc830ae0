"""The three steps of EpiKV's calibration: files, labels, and the layers that follow."""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from training import epikv_files as files
from training import epikv_layers as layers
from training.__main__ import main
from training.epikv_files import append, read_lines, resume
from training.epikv_layers import Correlation, correlate, find_band, proposals, spearman
from training.epikv_traces import StepReader, Windows, label, label_all
from vllm_kvpolicy.policies import compose as factory

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
    assert files.boxed_answer(text) == answer


def test_answers_agree_however_they_are_written() -> None:
    same = [(r"\dfrac{1}{2}", r"\frac{1} {2}"), ("1,200", "1200.0"), ("$5$", "5.")]
    assert all(files.same_answer(*pair) for pair in same)
    others = [("5", "6"), ("x", "y"), (None, "5")]
    assert not any(files.same_answer(*pair) for pair in others)


@pytest.mark.parametrize(
    ("pieces", "start"),
    [
        (["p", "a", "</think>", "\n", " ", "7"], 5),
        (["p", "a", "</th", "ink>", "7", "8"], 4),
        (["</think>", "a", "b", "so \\box", "ed{7}"], 3),
        (["p", "a", "b", "\\boxed{", "7}"], 3),
        (["p"] + ["a"] * 100, 37),
        (["p", "a", "b"], 2),
        (["p"], 1),
    ],
)
def test_where_the_answer_begins(pieces: list[str], start: int) -> None:
    assert files.answer_start(pieces, 1) == start


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


@pytest.mark.parametrize("key_at", [0, 33, 69])
def test_tokens_of_windows_that_change_the_answer(key_at: int) -> None:
    trace, model = make_trace(key_at), Model()
    made = label(trace, pieces_of(trace["token_ids"]), WINDOWS, model)
    end = PROMPT + BODY + 1
    spans = [range(s, min(s + 32, end)) for s in range(PROMPT, end, 16)]
    important = {i for span in spans if PROMPT + key_at in span for i in span}
    want = [1] * PROMPT + [int(i in important) for i in range(PROMPT, end)] + [-1, -1]
    assert made["importance"] == want
    changed = sum(PROMPT + key_at in span for span in spans)
    stats = {"answer_start": end, "filler": "eos", "windows": len(spans)}
    assert made["label_stats"] == stats | {"changed": changed}
    assert trace.items() <= made.items()


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
        trace["token_ids"] for trace in traces[::2]
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


# How far each of 12 layers goes with the labels.
STRENGTHS = (0, 0.8, 1, 1, 0.8, 0, 0.7, 0, -0.8, -1, -0.8, 0)
PROMPT, TOKENS = 20, 400


def make_traces(num_traces: int = 8, seed: int = 0) -> list[dict]:
    """Traces whose layers move more, or less, where the answer depends on it."""
    rng = np.random.default_rng(seed)
    traces = []
    for _ in range(num_traces):
        importance = np.repeat(rng.integers(0, 2, TOKENS // 40), 40)
        noise = rng.normal(size=(len(STRENGTHS), TOKENS)) * 2
        signals = {
            f"hs_l2_diff_l{layer}": (10 + strength * importance + row).tolist()
            for layer, (strength, row) in enumerate(zip(STRENGTHS, noise, strict=True))
        }
        importance[:PROMPT], importance[-9:] = 1, -1
        ids = rng.integers(0, 99, TOKENS).tolist()
        trace = {"token_ids": ids, "prompt_len": PROMPT, "signals": signals}
        traces.append(trace | {"importance": importance.tolist()})
    return traces


def ranks_by_counting(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values)
        + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def test_spearman_with_ties() -> None:
    rng = random.Random(0)
    first = [rng.randrange(8) for _ in range(60)]
    second = [rng.randrange(2) + value / 9 for value in first]
    ranks = np.array([ranks_by_counting(first), ranks_by_counting(second)])
    want = np.corrcoef(ranks)[0, 1]
    assert spearman(np.array(first), np.array(second)) == pytest.approx(want, abs=1e-12)
    assert 0 < want < 1
    assert spearman(np.arange(9), -(np.arange(9.0) ** 3)) == pytest.approx(-1)
    assert np.isnan(spearman(np.arange(9), np.ones(9)))


def test_only_labelled_answers_count() -> None:
    """Prompt and answer may hold anything; the mean looks back into the prompt."""
    trace = make_traces(1)[0]
    (name, values), *_ = trace["signals"].items()
    found = correlate([trace], window=5, num_folds=1)[name]
    means = [np.mean(values[max(0, i - 4) : i + 1]) for i in range(TOKENS)]
    want = spearman(
        np.array(means[PROMPT:-9]), np.array(trace["importance"][PROMPT:-9])
    )
    assert found.rho == pytest.approx(want, abs=1e-9)
    assert found.num_pairs == TOKENS - PROMPT - 9


def test_bands_are_found() -> None:
    found = correlate(make_traces(), window=16, num_folds=4)
    detrend, band = proposals(found)
    expected = {"a_first": 1, "a_last": 4, "b_first": 8, "b_last": 10}
    assert band["variant"] == "band"
    assert {key: band[key] for key in expected} == expected
    assert 0.8 < band["a_weight"] < 1.3
    assert detrend["variant"] == "detrend"
    assert detrend["a_first"] == detrend["a_last"] == 2
    assert detrend["b_first"] == detrend["b_last"] == 9
    for options in (detrend, band):
        assert factory.build("epikv", options).needs.signals


def flat(rho: float, *folds: float) -> Correlation:
    return Correlation(rho, folds or (rho,), 100)


def test_a_band_ends_where_the_sign_does() -> None:
    rhos = {0: flat(0.1), 1: flat(0.2), 2: flat(0.4, 0.5, -0.1), 3: flat(0.25)}
    assert find_band(rhos, 1) == (0, 1)
    assert find_band({**rhos, 3: flat(0.4)}, 1) == (3, 3)
    assert find_band({0: flat(0.2), 2: flat(0.1)}, 1) == (0, 0)  # no neighbours
    assert find_band(rhos, -1) is None
    assert find_band({0: flat(float("nan"))}, 1) is None
    with pytest.raises(
        ValueError, match="band b: no layer correlates with a stable sign"
    ):
        proposals({"hs_l2_diff_l0": flat(0.3), "other": flat(-0.3)})


def test_signals_must_be_as_long_as_labels() -> None:
    trace = make_traces(1)[0]
    trace["signals"]["hs_l2_diff_l0"].pop()
    with pytest.raises(ValueError, match="got 399 values for 400 labelled tokens"):
        correlate([trace], 64, 1)
    with pytest.raises(ValueError, match="no trace has both"):
        correlate([], 64, 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_traces()
    labels = [{k: v for k, v in trace.items() if k != "signals"} for trace in made]
    traces = [{k: v for k, v in trace.items() if k != "importance"} for trace in made]
    assert layers.join(traces, labels[3:]) == made[3:]
    for name, lines in (("traces", traces), ("labels", labels[::-1])):
        append(tmp_path / f"{name}.jsonl", lines)
    files = [f"--{name}={tmp_path / name}.jsonl" for name in ("traces", "labels")]
    main(["epikv-layers", *files, f"--output={tmp_path / 'table.csv'}", "--window=16"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"wrote {tmp_path / 'table.csv'}: correlations of ")
    (line,) = (x for x in printed.splitlines() if '"band"' in x)
    options = json.loads(line.split("'")[1])
    assert factory.build("epikv", options).needs.positions
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(STRENGTHS)
    strongest = [abs(float(row["spearman_rho"])) for row in rows]
    assert strongest == sorted(strongest, reverse=True)
    with pytest.raises(SystemExit):
        main(["epikv-layers", files[0], f"--labels={tmp_path / 'none.jsonl'}"])
    assert "cannot read" in capsys.readouterr().err


def test_the_reader_joins_chunks_and_tells_sequences_apart() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Identity() for _ in range(2))
    reader = StepReader(model, 2)
    for seed in range(2):
        torch.manual_seed(seed)
        states = torch.randn(2, 12, 5)
        reader.forget()
        for start, end in ((0, 5), (5, 6), (6, 12)):
            for layer, state in zip(model.layers, states, strict=True):
                layer(state[start:end])
        steps = reader.take()
        for index in range(2):
            want = [0.0, *states[index].diff(dim=0).norm(dim=-1).tolist()]
            assert steps[f"hs_l2_diff_l{index}"] == pytest.approx(want, rel=1e-5)
