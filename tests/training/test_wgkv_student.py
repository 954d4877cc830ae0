"""Gated attention and its losses: the authors' bias, plain formulas, and models."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.golden import read_golden
from support.tiny_model import make_tiny_model
from support.training_rows import ids
from training import model as model_module
from training import wgkv
from training.model import Base, attention, load_base, weighed
from training.wgkv import LEAST, Gating, Settings, distillation, log_weights, new_gates
from training.wgkv import position_weights as weights_of
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights

WINDOW = 8


def spread_gates(base: Base) -> GateWeights:
    """Gates all over the range from 0 to 1, unlike those that training starts with."""
    weights = new_gates(base, Settings(0, seed=1))
    weights.second.data *= 20
    return weights


def constant_gates(base: Base, logit: float) -> GateWeights:
    """Gates that are all sigmoid(logit)."""
    weights = new_gates(base, Settings(0))
    weights.second.data.zero_()
    weights.second_bias.data.fill_(logit)
    return weights


def test_training_bias_of_the_authors() -> None:
    golden = read_golden("wgkv_gate")
    _, _, num_tokens, window = map(int, golden["train_shape"])
    gates, want = torch.from_numpy(golden["train_g"]), golden["train_bias"]
    got = weighed(log_weights(gates), window, 0, torch.arange(num_tokens)).numpy()
    seen = np.tri(num_tokens, dtype=bool)
    np.testing.assert_allclose(got[:, seen], want[:, seen], rtol=1e-5, atol=1e-6)
    assert np.isneginf(got[:, ~seen]).all()
    assert (got[:, seen] < 0).any() and (got[:, seen] == 0).any()


def test_bias_by_hand() -> None:
    gates = torch.tensor([0.5, 0.0, 1.0, 0.2, 0.9])
    got = weighed(log_weights(gates), 2, 1, torch.tensor([4, 1]))
    half, least, fifth = (float(np.log(x)) for x in (0.5, LEAST, 0.2))
    hidden = -torch.inf
    assert half < 0 and fifth < 0  # the first is a sink, the fourth in the window
    want = torch.tensor([[0, least, 0, 0, 0], [0, 0, hidden, hidden, hidden]])
    torch.testing.assert_close(got, want)


def test_gradient_ends_at_the_smallest_gate() -> None:
    gates = torch.tensor([0.5, LEAST / 2, 0.3, 0.3]).requires_grad_()
    log_weights(gates)[:3].sum().backward()
    torch.testing.assert_close(gates.grad, torch.tensor([2.0, 0, 1 / 0.3, 0]))


def formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Softmax attention as it is written, one query head at a time, [B, T, Hq, D]."""
    heads = []
    for index in range(query.shape[1]):
        own = index // (query.shape[1] // key.shape[1])
        logits = query[:, index] @ key[:, own].mT * scaling + bias[:, own]
        heads.append(logits.softmax(-1) @ value[:, own])
    return torch.stack(heads, 2)


@pytest.mark.parametrize("block", [512, 7, WINDOW + 3])  # one key behind the sinks
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_attention_by_its_formula(
    monkeypatch: pytest.MonkeyPatch, qwen3: Base, block: int, threshold: float | None
) -> None:
    monkeypatch.setattr(model_module, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 40, 32, generator=generator)
    key, value = torch.randn(2, 2, 2, 40, 32, generator=generator)
    ends = []
    for by_formula in (True, False):
        weights = spread_gates(qwen3)
        query, key, value = (t.detach().requires_grad_() for t in (query, key, value))
        gating = Gating(weights, qwen3.rope, WINDOW, 2, threshold)
        if by_formula:
            _, known = gating.prepare(1, query, key)
            bias = weighed(known, *gating.always, torch.arange(40))
            out = formula(query, key, value, bias, 0.3)
        else:
            module = SimpleNamespace(layer_idx=1)
            out, none = attention(module, query, key, value, None, 0.3, gating)
            assert none is None
        out.square().sum().backward()
        given = [query.grad, key.grad, value.grad]
        if threshold is None:
            given.append(weights.first.grad[1])
        ends.append((out.detach(), given))
    torch.testing.assert_close(ends[0][0], ends[1][0])
    assert all(gradient.abs().max() > 1e-3 for gradient in ends[0][1])
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-3, atol=1e-5)


def test_the_teacher_is_the_model(
    base: Base, tiny_model: Path, tiny_llama: Path
) -> None:
    flavour = base.flavour
    folder = {"qwen3": tiny_model, "llama": tiny_llama}[flavour]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = model(ids(50)[None], output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(base.hidden(ids(50)), want, rtol=1e-4, atol=1e-4)
    shape = (base.num_layers, base.num_kv_heads, base.head_dim)
    assert shape == (2, 2, {"qwen3": 32, "llama": 16}[flavour])
    assert base.rope_theta == {"qwen3": 1e4, "llama": 5e5}[flavour]


def test_a_kept_teacher_computes_a_row_once(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    plain = load_base(str(tiny_model), "cpu", torch.float32)
    kept = load_base(str(tiny_model), "cpu", torch.float32, kept=tmp_path / "kept")
    first = [kept.hidden(ids(count)) for count in (20, 30)]
    monkeypatch.delattr(Base, "_computed")  # so that it cannot compute again
    again = [kept.hidden(ids(count)) for count in (20, 30)]
    with pytest.raises(AttributeError):
        kept.hidden(ids(21))
    kept.decoder.norm.weight.data += 1
    with pytest.raises(AttributeError):
        kept.hidden(ids(20))
    monkeypatch.undo()
    want = [plain.hidden(ids(count)) for count in (20, 30)]
    torch.testing.assert_close([first, again], [want, want], rtol=0, atol=0)


@torch.no_grad()
def test_open_gates_give_the_teacher(base: Base) -> None:
    weights = constant_gates(base, 30.0)
    teacher = base.hidden(ids(50))
    for threshold in (None, 0.1):
        gating = Gating(weights, base.rope, WINDOW, threshold=threshold)
        student = base.hidden(ids(50), gating)
        torch.testing.assert_close(student, teacher, rtol=1e-4, atol=1e-4)
        assert sorted(gating.values) == [0, 1]
        assert gating.values[1].shape == (1, 2, 50)


@pytest.mark.parametrize("sinks", [0, 3])
@torch.no_grad()
def test_hidden_tokens_are_hidden(tmp_path: Path, sinks: int) -> None:
    """Against the model's own attention, masked by loops over queries and keys."""
    folder = make_tiny_model(tmp_path, layers=1)
    base = load_base(str(folder), "cpu", torch.float32)
    weights = spread_gates(base)
    gating = Gating(weights, base.rope, WINDOW, sinks, threshold=0.5)
    got = base.hidden(ids(40), gating)
    keep = gating.values[0][0] > 0.5
    assert 0.2 < keep.float().mean() < 0.8
    mask = torch.full((1, 4, 40, 40), -torch.inf)
    for head, query, key in np.ndindex(4, 40, 40):
        inside = query - key < WINDOW or key < sinks
        if key <= query and (inside or keep[head // 2, key]):
            mask[0, head, query, key] = 0
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    want = model.model(ids(40)[None], attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_gates_see_keys_as_they_were_before_rope(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Qwen3 behind the key norm, for Llama as projected."""
    module = base.decoder.layers[1].self_attn
    source = module.k_norm if base.flavour == "qwen3" else module.k_proj
    made = []
    handle = source.register_forward_hook(lambda _, __, out: made.append(out))
    seen = []

    def spy(before: torch.Tensor, after: torch.Tensor, weights: GateWeights):
        seen.append(before)
        return gate(before, after, weights)

    gate = wgkv.gate
    monkeypatch.setattr(wgkv, "gate", spy)
    gating = Gating(new_gates(base, Settings(0)), base.rope, WINDOW)
    base.hidden(ids(200), gating)
    handle.remove()
    want = made[0].view(1, 200, 2, base.head_dim).transpose(1, 2)
    torch.testing.assert_close(seen[1], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model: got type 'gpt2', expected llama or qwen3"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "expected full attention only",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "model: got RoPE of type 'dynamic', expected one of",
        ),
    ],
)
def test_models_that_are_refused(tmp_path: Path, change: dict, text: str) -> None:
    path = make_tiny_model(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=text):
        load_base(str(tmp_path), "cpu", torch.float32)


def gates(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("num_tokens", "window"), [(50, 1), (50, 13), (50, 50)])
def test_a_weight_is_the_share_of_queries_beyond_the_window(
    num_tokens: int, window: int
) -> None:
    position = torch.arange(num_tokens)
    distance = position[:, None] - position
    beyond = (distance >= window).sum(0) / (distance >= 0).sum(0)
    torch.testing.assert_close(weights_of(num_tokens, window), beyond.float())


def test_sinks_have_no_weight() -> None:
    plain, sinks = weights_of(20, 4), weights_of(20, 4, sinks=3)
    assert (plain[:3] > 0).all() and (sinks[:3] == 0).all()
    assert torch.equal(sinks[3:], plain[3:])


def test_sparsity_is_the_chance_that_one_of_two_draws_keeps_a_token() -> None:
    g, w = gates(3, 2, 4, 20), weights_of(20, 4)
    s = 1 - (1 - g) ** 2
    torch.testing.assert_close(g + g * (1 - g), s)
    torch.testing.assert_close(wgkv.sparsity(g, w), ((1 - w) + w * s).mean())


def test_gradient_of_sparsity() -> None:
    g, w = gates(2, 20).requires_grad_(), weights_of(20, 4)
    wgkv.sparsity(g, w).backward()
    torch.testing.assert_close(g.grad, 2 * w * (1 - g.detach()) / g.numel())


def test_distillation_is_a_mean_over_all_numbers() -> None:
    student, teacher = gates(1, 4, 8).bfloat16(), torch.zeros(1, 4, 8)
    got = distillation(student, teacher)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, student.float().square().mean())


def test_distillation_counts_what_it_is_told_to() -> None:
    student, teacher = gates(1, 4, 8).requires_grad_(), torch.zeros(1, 4, 8)
    counts = torch.tensor([False, True, False, True])
    got = distillation(student, teacher, counts)
    torch.testing.assert_close(got, student[:, [1, 3]].square().mean())
    got.backward()
    assert (student.grad[:, [0, 2]] == 0).all() and (student.grad[:, 1] != 0).all()
