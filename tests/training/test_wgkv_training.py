"""Training of write gates on a tiny model: what it learns and refuses."""

import json
import math
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from support.training_rows import TOKENS, rows
from training import options, wgkv
from training.model import Base, load_base
from training.rows import Row
from training.wgkv import Figures, Gating, Settings, measure, new_gates, rate, train
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights
from vllm_kvpolicy.policies.admissions.wgkv import load

WINDOW = 8
QUICK = Settings(1.2, window=WINDOW, steps=100, learning_rate=0.02)
SHORT = replace(QUICK, steps=6, rows_per_step=2)
LAMBDAS = (0.3, 1.2)


@pytest.fixture(scope="module")
def trained(
    qwen3: Base, tmp_path_factory: pytest.TempPathFactory
) -> dict[float, tuple[GateWeights, Figures]]:
    """Gates of the tiny model by sparsity weight, and their figures."""
    folder = tmp_path_factory.mktemp("trained")
    found = {}
    for weight in LAMBDAS:
        settings = replace(QUICK, sparsity_weight=weight)
        state = folder / f"{weight}.state"
        weights = train(qwen3, cycle(rows(32)), settings, state)
        found[weight] = weights, measure(qwen3, rows(8, 1), weights, WINDOW, 0, 0.1)
    return found


def test_less_is_kept_for_a_larger_lambda(trained: dict) -> None:
    figures = [trained[weight][1] for weight in LAMBDAS]
    kept = [item.kept_fraction for item in figures]
    assert kept[0] > kept[1] + 0.1
    for name in ("soft_loss", "hard_loss"):
        losses = [getattr(item, name) for item in figures]
        assert losses == sorted(losses)


def test_trained_and_served_losses_are_close(trained: dict) -> None:
    for _, figures in trained.values():
        gap = abs(figures.hard_loss - figures.soft_loss)
        assert gap < 0.15 * figures.window_loss


def test_trained_gates_choose_better_than_gates_of_chance(
    qwen3: Base, trained: dict
) -> None:
    _, figures = trained[1.2]
    chance = new_gates(qwen3, QUICK)
    with torch.no_grad():
        gating = Gating(chance, qwen3.rope, WINDOW)
        qwen3.hidden(rows(1, 1)[0].ids, gating)
    gates = torch.stack([gating.values[0], gating.values[1]])
    threshold = gates.quantile(1 - figures.kept_fraction).item()
    by_chance = measure(qwen3, rows(8, 1), chance, WINDOW, 0, threshold)
    assert by_chance.kept_fraction > figures.kept_fraction - 0.05
    assert figures.hard_loss < 0.6 * by_chance.hard_loss
    assert figures.hard_loss < 0.5 * figures.window_loss


def test_figures_by_hand(qwen3: Base, trained: dict) -> None:
    weights, _ = trained[1.2]
    (row,) = rows(1, 2)
    got = measure(qwen3, [row], weights, WINDOW, 3, 0.1)
    gating = Gating(weights, qwen3.rope, WINDOW, 3, threshold=0.1)
    with torch.no_grad():
        gap = qwen3.hidden(row.ids, gating) - qwen3.hidden(row.ids)
    keep = torch.stack([gating.values[0][0], gating.values[1][0]]) > 0.1
    keep[..., :3] = True
    assert math.isclose(got.hard_loss, gap.square().mean(), rel_tol=1e-4)
    assert math.isclose(got.kept_fraction, keep.float().mean(), rel_tol=1e-5)
    torch.testing.assert_close(torch.tensor(got.kept_by_head), keep.float().mean(-1))
    keep[..., TOKENS - WINDOW :] = True
    assert math.isclose(got.cached_fraction, keep.float().mean(), rel_tol=1e-5)
    assert got.tokens == TOKENS


def test_losses_are_weighed_by_what_counts(qwen3: Base) -> None:
    weights = new_gates(qwen3, QUICK)
    first, second = rows(2)
    counts = torch.zeros(TOKENS, dtype=torch.bool)
    counts[-5:] = True
    some = Row(second.ids, counts)
    parts = [measure(qwen3, [row], weights, WINDOW, 0, 0.5) for row in (first, some)]
    both = measure(qwen3, [first, some], weights, WINDOW, 0, 0.5)
    want = (parts[0].hard_loss * TOKENS + parts[1].hard_loss * 5) / (TOKENS + 5)
    assert math.isclose(both.hard_loss, want, rel_tol=1e-4)
    assert (
        parts[1].kept_fraction
        == measure(qwen3, [second], weights, WINDOW, 0, 0.5).kept_fraction
    )
    assert parts[0].hard_loss != pytest.approx(parts[1].hard_loss, rel=1e-2)


def test_gates_start_near_one_half(llama: Base) -> None:
    weights = new_gates(llama, replace(QUICK, seed=7))
    assert weights.first.shape == (2, 2, 64, 32)  # 4 units per channel for llama
    bound = 32**-0.5
    assert 0.95 * bound < weights.first.abs().max() <= bound
    assert 0.9 * 64**-0.5 < weights.second.abs().max() <= 64**-0.5
    assert (weights.pre_norm == 1).all() and (weights.post_norm == 1).all()
    gating = Gating(weights, llama.rope, WINDOW)
    with torch.no_grad():
        llama.hidden(rows(1)[0].ids, gating)
    assert ((gating.values[1] - 0.5).abs() < 0.25).all()
    again, other = (new_gates(llama, replace(QUICK, seed=s)) for s in (7, 8))
    assert torch.equal(again.first, weights.first)
    assert not torch.equal(other.first, weights.first)


def test_learning_rate() -> None:
    rates = [rate(step, 100, 0.1) for step in range(100)]
    rising, falling = rates[:11], rates[10:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10] == 1 and rates[55] == pytest.approx(0.5) and rates[-1] < 1e-3


def test_every_tensor_learns_and_the_model_does_not(
    qwen3: Base, tmp_path: Path
) -> None:
    before = {name: t.clone() for name, t in qwen3.decoder.state_dict().items()}
    weights = train(qwen3, iter(rows(12)), SHORT, tmp_path / "state")
    for name, tensor in new_gates(qwen3, SHORT).tensors().items():
        assert (weights.tensors()[name] - tensor).abs().amax() > 1e-4
    for name, tensor in qwen3.decoder.state_dict().items():
        assert torch.equal(tensor, before[name])


def after_one_step(base: Base, state: Path, **change: object) -> dict:
    """The state of a run of many steps that was cut off after the first."""
    settings = replace(QUICK, steps=20, warmup=0.5, weight_decay=0.0, **change)
    (row,) = rows(1)
    with pytest.raises(ValueError, match="rows: ran out at step 2 of 20"):
        train(base, iter([row] * settings.rows_per_step), settings, state, 1)
    return torch.load(state, weights_only=True)


def test_a_step_takes_the_learning_rate_of_its_time(
    qwen3: Base, tmp_path: Path
) -> None:
    """The first step of AdamW is as long as its rate, here one of 11 of the warm-up."""
    found = after_one_step(qwen3, tmp_path / "state")["weights"]
    for name, tensor in new_gates(qwen3, QUICK).tensors().items():
        length = (found[name] - tensor.detach()).abs().max().item()
        assert length == pytest.approx(QUICK.learning_rate / 11, rel=1e-2)


def test_a_step_takes_the_mean_of_its_rows(qwen3: Base, tmp_path: Path) -> None:
    one, three = (
        after_one_step(qwen3, tmp_path / str(count), rows_per_step=count)["optimizer"]
        for count in (1, 3)
    )
    for index, state in one["state"].items():
        gradient = three["state"][index]["exp_avg"]
        torch.testing.assert_close(gradient, state["exp_avg"], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "value"), [("window", 9), ("sparsity_weight", 0.1), ("data", "other")]
)
def test_a_run_of_other_settings_is_refused(
    qwen3: Base, tmp_path: Path, name: str, value: object
) -> None:
    state = tmp_path / "state"
    train(qwen3, iter(rows(1)), replace(QUICK, steps=1), state)
    with pytest.raises(
        ValueError, match=f"{name}: got .* from an earlier run, expected"
    ):
        train(qwen3, iter(rows(1)), replace(QUICK, steps=1, **{name: value}), state)


@pytest.mark.parametrize("content", [b"none", "cut", {"settings": {}}])
def test_a_damaged_state_is_refused(
    qwen3: Base, tmp_path: Path, content: object
) -> None:
    state = tmp_path / "state"
    train(qwen3, iter(rows(1)), replace(QUICK, steps=1), state)
    if isinstance(content, dict):
        torch.save(content, state)
    else:
        whole = state.read_bytes()
        state.write_bytes(content if isinstance(content, bytes) else whole[:-100])
    with pytest.raises(ValueError, match=f"^{state}: got content that cannot be read"):
        train(qwen3, iter(rows(1)), replace(QUICK, steps=1), state)


def test_a_loss_that_is_no_number_is_not_saved(qwen3: Base, tmp_path: Path) -> None:
    settings = replace(SHORT, sparsity_weight=math.inf)
    with pytest.raises(ValueError, match="loss: got inf, expected a finite number"):
        train(qwen3, iter(rows(12)), settings, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_model_in_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    """As on a GPU: gates stay in float32."""
    half = load_base(str(tiny_model), "cpu", torch.bfloat16)
    assert half.hidden(rows(1)[0].ids).dtype == torch.bfloat16
    weights = train(half, iter(rows(12)), SHORT, tmp_path / "state")
    assert {t.dtype for t in weights.tensors().values()} == {torch.float32}


OPTIONS = [
    *("--window", "8", "--steps", "3", "--rows-per-step", "2", "--sinks", "2"),
    *("--validation-rows", "2", "--lambdas", "0.1", "20", "--learning-rate", "0.1"),
    *("--device", "cpu", "--dtype", "float32"),
]


def test_options_say_how_short_rows_may_be_and_the_machine_the_dtype(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": "x" * count}) for count in (7, 8, 30, 30)]
    text.write_text("\n".join(lines))
    command = [str(tiny_model), "--text", str(text), "--output", str(tmp_path / "out")]
    command += ["--length", "20", "--validation-rows", "1", "--instruction", ""]
    given = wgkv.parse([*command, "--device", "cpu", "--shortest", "8"])
    assert [len(row) for row in options.rows_of(given).training] == [8, 20]
    assert options.words_of(given).endswith("at least 8 tokens, length 20")
    for has, dtype in (({"amx_bf16": True}, torch.bfloat16), ({}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: has)
        assert options.dtype_of(given) == dtype


def test_the_command_writes_gates_and_their_figures(
    tiny_model: Path, tmp_path: Path, on_text: list[str]
) -> None:
    output = tmp_path / "out"
    command = [*on_text, *OPTIONS, "--length", "40"]
    wgkv.main(command)
    content = json.loads((output / "figures.json").read_text())
    assert content["model"] == str(tiny_model)
    assert [run["sparsity_weight"] for run in content["runs"]] == [0.1, 20]
    for run in content["runs"]:
        gates = load(output / run["file"])
        gates.check_model("qwen3", 1e4, num_layers=2, num_kv_heads=2, head_dim=32)
        assert (gates.window, gates.sinks, gates.threshold) == (8, 2, 0.1)
        assert gates.sparsity_weight == run["sparsity_weight"]
        assert gates.kept_fraction == run["kept_fraction"]
        heads = torch.tensor(run["kept_by_head"])
        assert heads.shape == (gates.num_layers, gates.num_kv_heads)
        assert math.isclose(heads.mean(), run["kept_fraction"], rel_tol=1e-5)
    first = load(output / "wgkv-20.safetensors")
    wgkv.main(command)  # nothing is left to do
    again = load(output / "wgkv-20.safetensors")
    assert all(torch.equal(again.tensors[k], t) for k, t in first.tensors.items())
