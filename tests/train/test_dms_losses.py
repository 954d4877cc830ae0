"""The losses of the trainer of DMS, and what its steps aim at."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from vllm_kvpolicy.train.base import Base
from vllm_kvpolicy.train.dms import losses as dms_losses
from vllm_kvpolicy.train.dms.losses import compression, distillation
from vllm_kvpolicy.train.dms.settings import ADAPTER, BORROWED, Settings
from vllm_kvpolicy.train.rows import Row


def states(count: int, seed: int, size: int = 64) -> torch.Tensor:
    return torch.randn(1, count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [512, 16, 7])
def test_distillation_is_the_divergence_from_the_student(
    monkeypatch: pytest.MonkeyPatch, qwen3: Base, block: int
) -> None:
    monkeypatch.setattr(dms_losses, "BLOCK", block)
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


def test_distillation_of_the_same_is_nothing(qwen3: Base) -> None:
    row, ends = Row(torch.arange(9) + 3), Row(torch.ones(9, dtype=torch.int64))
    assert distillation(qwen3, states(9, 0), qwen3, states(9, 0), row) == (0, 9)
    none = distillation(qwen3, states(9, 0), qwen3, states(9, 1), ends)
    assert none == (0, 0)  # nothing but ends


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


def test_ratios_of_the_recipe() -> None:
    assert ADAPTER.steps == 510 and ADAPTER.milestones[238] == 8
    for step in (0, 34, 100, 238, 509):
        assert ADAPTER.ratio(step) == pytest.approx(1 + step / 34)
        assert ADAPTER.dropped(step) == pytest.approx(1 - 1 / (1 + step / 34))


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
    settings = Settings(
        targets=(1.5, 3.0), steps_per_ratio=2, hold_steps=2, fade_steps=1
    )
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
