"""Training of DuoAttention's patterns on a tiny model: what it learns and writes."""

from itertools import cycle
from pathlib import Path

import pytest
import torch

from support.training_rows import TOKENS, rows
from training import duo
from training.duo import Mixing, Settings, measure, train
from training.model import Base
from vllm_kvpolicy.policies.admissions.duo import Pattern, load

WINDOW, SINKS = 8, 2
QUICK = Settings(0.1, window=WINDOW, sinks=SINKS, steps=60, learning_rate=0.1)


def pattern_of(use: torch.Tensor) -> Pattern:
    return Pattern(use.double(), SINKS, WINDOW, "")


def test_the_heads_that_need_least_cost_least(base: Base, tmp_path: Path) -> None:
    use = train(base, cycle(rows(16)), QUICK, tmp_path / "state")
    assert use.shape == (2, 2) and 0 <= use.min() < use.max() <= 1
    least, most = (
        measure(base, rows(6, 1), pattern_of(ordered), 0.5).hard_loss
        for ordered in (use, 1 - use)
    )
    every = measure(base, rows(6, 1), pattern_of(use), 1)
    assert least < 0.7 * most
    assert every.hard_loss == pytest.approx(every.window_loss)
    assert measure(base, rows(6, 1), pattern_of(use), 0).hard_loss < 1e-9


def test_a_larger_weight_leaves_less(qwen3: Base, tmp_path: Path) -> None:
    small, large = (
        train(qwen3, cycle(rows(16)), Settings(weight, WINDOW, SINKS, 30, 1, 0.1), path)
        for weight, path in ((0.01, tmp_path / "small"), (1.0, tmp_path / "large"))
    )
    assert large.mean() < small.mean() - 0.1


def test_one_sees_all_and_nought_the_window_and_the_sinks(qwen3: Base) -> None:
    """A head between them, by hand: what it sees outside has so much of its weight."""
    (row,) = rows(1)
    layers = torch.ones(2, 2)
    with torch.no_grad():
        whole = qwen3.hidden(row.ids)
        same = qwen3.hidden(row.ids, Mixing(layers, WINDOW, SINKS))
        torch.testing.assert_close(same, whole, rtol=1e-4, atol=1e-5)
        served = Mixing(torch.tensor([[True, False], [False, True]]), WINDOW, SINKS)
        qwen3.hidden(row.ids, served)
    keep = served.keep()
    assert keep.shape == (2, 1, 2, TOKENS)
    assert keep[0, 0, 0].all() and keep[1, 0, 1].all()
    assert keep[0, 0, 1].tolist() == [at < SINKS for at in range(TOKENS)]
    with torch.no_grad():
        alone, none = (
            qwen3.hidden(row.ids, Mixing(some, WINDOW, SINKS))
            for some in (layers * 0, layers > 1)
        )
    torch.testing.assert_close(alone, none, rtol=1e-4, atol=1e-5)


def test_a_head_mixes_the_outputs_of_two_attentions(qwen3: Base) -> None:
    """Of the first layer, by hand; a closed head still learns that it is needed."""
    (row,) = rows(1)
    outputs = []
    projection = qwen3.decoder.layers[0].self_attn.o_proj
    hook = projection.register_forward_pre_hook(
        lambda module, given: outputs.append(given[0].unflatten(-1, (4, 32)))
    )
    use = torch.tensor([[0.25, 0.0], [1.0, 1.0]], requires_grad=True)
    for some in (torch.ones(2, 2), torch.zeros(2, 2), use):
        out = qwen3.hidden(row.ids, Mixing(some, WINDOW, SINKS))
    hook.remove()
    whole, alone, mixed = outputs
    want = torch.cat(
        [0.25 * whole[..., :2, :] + 0.75 * alone[..., :2, :], alone[..., 2:, :]], -2
    )
    torch.testing.assert_close(mixed, want, rtol=1e-4, atol=1e-5)
    (out - qwen3.hidden(row.ids)).square().mean().backward()
    assert (use.grad[0] < 0).all()


def test_the_command_writes_a_pattern_that_servers_read(
    tmp_path: Path, on_text: list[str]
) -> None:
    output = tmp_path / "out"
    command = [*on_text, "--length", "40", "--window", "8", "--sinks", "2"]
    command += ["--steps", "3", "--validation-rows", "2"]
    command += ["--device", "cpu", "--dtype", "float32"]
    duo.main(command)
    pattern = load(output)
    pattern.check_shape(2, 2)
    assert (pattern.sinks, pattern.recent) == (2, 8)
    assert pattern.use.max() < 1
    duo.main(command)  # nothing is left to do
    assert torch.equal(load(output).use, pattern.use)
