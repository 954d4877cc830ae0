"""Passes that drop tokens as DMS does; the losses of its trainer, their schedule."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from support.tiny_model import make_tiny_model
from support.training_rows import ids
from training import dms
from training.dms import compression, distillation
from training.dms_student import (
    ADAPTER,
    BORROWED,
    Dropping,
    Settings,
    new_adapter,
    noise_of,
    without_channel,
)
from training.model import Base, load_base, weighed
from training.rows import Row
from vllm_kvpolicy.kernels.dms_decision import DecisionWeights
from vllm_kvpolicy.kernels.rope import Rope

WINDOW = 5
SETTINGS = Settings(window=WINDOW)


def random_adapter(base: Base) -> DecisionWeights:
    """An adapter that drops about half of the tokens, and has norm weights."""
    generator = torch.Generator().manual_seed(1)
    weights = new_adapter(base)
    for tensor, centre in ((weights.norm, 1.0), (weights.projection, 0.0)):
        drawn = torch.randn(tensor.shape, generator=generator)
        tensor.data = centre + 0.3 * drawn
    return weights


def dropping(base: Base, weights: DecisionWeights | None, **how: object) -> Dropping:
    return Dropping(SETTINGS, base.rope, base.epsilon, weights, **how)


def drawn_logits(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(1, 2, num_tokens, generator=generator)


def bias_of(student: Dropping, logits: torch.Tensor) -> torch.Tensor:
    """The bias [B, H, T, T] of a pass whose layer 0 came to these logits."""
    num_tokens = logits.shape[-1]
    student.logits[0] = logits
    query, key = torch.zeros(1, 4, num_tokens, 8), torch.zeros(1, 2, num_tokens, 8)
    same, known = student.prepare(0, query, key)
    assert same is query
    assert known is not None
    return weighed(known, *student.always, torch.arange(num_tokens))


def test_training_weighs_by_the_decision_of_the_next_token(qwen3: Base) -> None:
    logits, noise = drawn_logits(12), noise_of(qwen3, 12, 3)
    got = bias_of(dropping(qwen3, new_adapter(qwen3), noise=noise), logits)
    for head, query, key in np.ndindex(2, 12, 12):
        found = got[0, head, query, key].item()
        if key > query:
            assert found == -np.inf
        elif query - key <= WINDOW:
            assert found == 0
        else:
            noisy = (logits[0, head, key + 1] + noise[0, head, key + 1]) / 0.1
            alpha = 1 / (1 + np.exp(-noisy.double().item()))
            if alpha < 0.999:
                assert found == pytest.approx(np.log(1 - alpha), rel=1e-3, abs=1e-6)
            else:
                assert found == pytest.approx(-noisy.item(), rel=1e-3, abs=1e-3)


def test_all_that_leaves_the_window_is_hidden(qwen3: Base) -> None:
    student = dropping(qwen3, new_adapter(qwen3), least=-torch.inf)
    got = bias_of(student, drawn_logits(20))
    distance = torch.arange(20)[:, None] - torch.arange(20)
    want = (distance >= 0) & (distance <= WINDOW)
    assert torch.equal(got == 0, want.expand_as(got))


def test_noise_is_logistic_and_told_by_its_place(qwen3: Base) -> None:
    noise = noise_of(qwen3, 20000, 42, 3, 1)
    assert noise.shape == (2, 2, 20000)
    for value in (-3.0, 0.0, 1.0, 5.0):
        share = (noise <= value).float().mean().item()
        assert share == pytest.approx(1 / (1 + np.exp(-value)), abs=5e-3)
    assert noise.isfinite().all()
    assert torch.equal(noise, noise_of(qwen3, 20000, 42, 3, 1))
    for place in ((42, 3, 0), (42, 4, 1), (43, 3, 1)):
        assert not torch.equal(noise, noise_of(qwen3, 20000, *place))


def test_decisions_have_the_gradient_of_the_sigmoid(qwen3: Base) -> None:
    noise = noise_of(qwen3, 40, 7)
    student = dropping(qwen3, new_adapter(qwen3), noise=noise)
    logits = (0.2 * drawn_logits(40)).requires_grad_()
    student.logits = {0: logits, 1: logits}
    alphas = student.alphas()
    assert alphas.shape == (2, 1, 2, 40)
    want = (logits.detach() + noise[:, None]) > 0
    assert torch.equal(alphas.detach().round().bool(), want)
    assert (alphas.detach() - want.float()).abs().max() < 1e-6
    alphas.sum().backward()
    soft = ((logits.detach() + noise[:, None]) / 0.1).sigmoid()
    torch.testing.assert_close(logits.grad, (soft * (1 - soft) / 0.1).sum(0))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_a_channel_is_taken_before_rope_and_behind(
    share: float, scaling: float
) -> None:
    before = torch.randn(2, 6, 9, 8, generator=torch.Generator().manual_seed(0))
    rope = Rope(Rope.from_theta(30.0, 8).inv_freq, scaling=scaling)
    angles = rope.angles(torch.arange(9)).float().repeat(1, 2)[None]
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    rotated, _ = apply_rotary_pos_emb(before, before, cos, sin)
    got, value = without_channel(rotated, 3, rope, share)
    torch.testing.assert_close(value, before[:, ::2, :, -1], atol=1e-5, rtol=1e-4)
    changed = before.clone()
    changed[:, ::2, :, -1] *= share
    want, _ = apply_rotary_pos_emb(changed, changed, cos, sin)
    want[:, ::2, :, -1] *= share
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_adapters_read_what_enters_a_layer(base: Base) -> None:
    weights = random_adapter(base)
    student = dropping(base, weights, least=torch.inf)  # so that nothing is dropped
    base.hidden(ids(40), student)
    states = base.decoder(ids(40)[None], output_hidden_states=True).hidden_states
    for layer in range(2):
        norm = Qwen3RMSNorm(base.hidden_size, eps=base.epsilon)
        norm.weight.data = weights.norm.data[layer]
        want = norm(states[layer]) @ weights.projection[layer].T * 100.0 - 5.0
        got = student.logits[layer].transpose(1, 2)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)


@torch.no_grad()
def test_a_new_adapter_gives_the_teacher(base: Base) -> None:
    student = dropping(base, new_adapter(base))
    teacher = base.hidden(ids(50))
    got = base.hidden(ids(50), student)
    torch.testing.assert_close(got, teacher, rtol=1e-4, atol=1e-4)
    assert (student.logits[1] == -5).all() and student.keep().all()
    noise = noise_of(base, 50, 1)
    noise[..., 10:20] = 6.0  # as it may happen in training
    noisy = dropping(base, new_adapter(base), noise=noise)
    assert (base.hidden(ids(50), noisy) - teacher).abs().max() > 1e-3


@torch.no_grad()
def test_dropped_tokens_are_hidden(tmp_path: Path) -> None:
    """Against the model's own attention, masked by loops over queries and keys."""
    folder = make_tiny_model(tmp_path, layers=1)
    base = load_base(str(folder), "cpu", torch.float32)
    student = dropping(base, random_adapter(base))
    got = base.hidden(ids(40), student)
    dropped = student.logits[0][0] > 0
    assert 0.2 < dropped.float().mean() < 0.8
    assert torch.equal(student.keep()[0, 0, :, :-1], ~dropped[:, 1:])
    mask = torch.full((1, 4, 40, 40), -torch.inf)
    for head, query, key in np.ndindex(4, 40, 40):
        near = query - key <= WINDOW
        if key <= query and (near or not dropped[head // 2, key + 1]):
            mask[0, head, query, key] = 0
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    want = model.model(ids(40)[None], attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def states(count: int, seed: int, size: int = 64) -> torch.Tensor:
    return torch.randn(1, count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [512, 7])
def test_distillation_is_the_divergence_from_the_student(
    monkeypatch: pytest.MonkeyPatch, qwen3: Base, block: int
) -> None:
    monkeypatch.setattr(dms, "BLOCK", block)
    student, teacher = states(33, 0).requires_grad_(), states(33, 1)
    row = torch.arange(33) + 3
    row[[5, 32]] = 1  # ends of texts, behind which nothing is to be learned
    total, number = distillation(qwen3, student, qwen3, teacher, Row(row))
    assert number == 31
    got = total / number
    own, wanted = (qwen3.logits(t)[0].log_softmax(-1) for t in (student, teacher))
    each = F.kl_div(wanted, own, log_target=True, reduction="none").sum(-1)
    counts = row != 1
    want = each[counts].mean()
    torch.testing.assert_close(got, want)
    (other,) = torch.autograd.grad(want, student, retain_graph=True)
    (gradient,) = torch.autograd.grad(got, student)
    torch.testing.assert_close(gradient, other)
    assert (gradient[0, 5] == 0).all() and (gradient[0, 4] != 0).any()


def test_distillation_counts_what_it_is_told_to(qwen3: Base) -> None:
    """But for ends of texts, which never count."""
    student, teacher, ids = states(9, 0), states(9, 1), torch.arange(9) + 3
    ids[4] = 1
    counts = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 0], dtype=torch.bool)
    got = distillation(qwen3, student, qwen3, teacher, Row(ids, counts))
    taken = [3, 5, 7]
    left = Row(ids[taken])
    want = distillation(qwen3, student[:, taken], qwen3, teacher[:, taken], left)
    torch.testing.assert_close(got, want)


def test_compression_does_not_pull_back() -> None:
    alphas = torch.tensor([0.0, 1.0, 0.0, 0.0]).requires_grad_()
    loss = compression(alphas, 0.75)
    loss.backward()
    assert loss == 0.5 and (alphas.grad == -0.25).all()
    assert compression(alphas, 0.25) == compression(alphas, 0.1) == 0


def test_ratios_of_the_paper() -> None:
    assert BORROWED.steps == 2700 and BORROWED.milestones == {2100: 2, 2300: 4, 2700: 8}
    for step in (0, 100, 699):
        assert BORROWED.ratio(2000 + step) == pytest.approx(1 + step / 100)
    assert BORROWED.ratio(1999) == 1 and BORROWED.dropped(5) == 0


def test_channels_fade_to_nothing() -> None:
    fading = replace(BORROWED, fade_steps=4)
    found = [fading.fade(step) for step in range(5)]
    assert found == [0.75, 0.5, 0.25, 0.0, None]
    assert ADAPTER.fade(0) is None


def test_ratios_rest_at_targets() -> None:
    holds = {"hold_steps": 2, "fade_steps": 1}
    settings = Settings(targets=(1.5, 3.0), steps_per_ratio=2, **holds)
    found = [settings.ratio(step) for step in range(settings.steps)]
    assert found == [1, 1, 1.5, 1.5, 1.5, 2, 2.5, 3, 3]
    assert settings.milestones == {4: 1.5, 9: 3.0}
    assert settings.ratio(settings.steps) == settings.ratio(99) == 3


def test_learning_rates_rest_too() -> None:
    settings = Settings(
        targets=(1.5, 2.0), steps_per_ratio=4, hold_steps=2, hold_rate=0.25
    )
    rates = [settings.rate(step) / 3e-5 for step in range(settings.steps)]
    assert rates == pytest.approx([1, 1, 0.25, 0.25] * 2)
    assert {ADAPTER.rate(step) for step in range(ADAPTER.steps)} == {3e-5}
    assert BORROWED.rate(1999) == BORROWED.rate(2699) == 3e-5
