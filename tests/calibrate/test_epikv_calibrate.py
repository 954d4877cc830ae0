"""Correlations with made-up labels, and the layers that follow from them."""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from vllm_kvpolicy.calibrate.command import main
from vllm_kvpolicy.calibrate.epikv_collect import StepReader
from vllm_kvpolicy.calibrate.epikv_files import append
from vllm_kvpolicy.calibrate.epikv_layers import (
    Correlation,
    correlate,
    find_band,
    join,
    proposals,
    spearman,
)
from vllm_kvpolicy.policies import compose as factory

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
        traces.append(
            {
                "token_ids": rng.integers(0, 99, TOKENS).tolist(),
                "prompt_len": PROMPT,
                "signals": signals,
                "importance": importance.tolist(),
            }
        )
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
    assert join(traces, labels[3:]) == made[3:]
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


@pytest.mark.parametrize("step", ["collect", "labels", "layers"])
def test_each_step_is_a_subcommand_with_help(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([f"epikv-{step}", "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert f"calibrate epikv-{step} " in printed and "--output" in printed
