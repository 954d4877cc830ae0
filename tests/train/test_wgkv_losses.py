"""The losses of the trainer of write gates, by their identities."""

import pytest
import torch

from vllm_kvpolicy.train.wgkv.losses import distillation, position_weights, sparsity


def gates(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_weights_of_positions() -> None:
    want = [1 - 4 / 7, 1 - 4 / 6, 1 - 4 / 5, 0, 0, 0, 0]
    torch.testing.assert_close(position_weights(7, 4), torch.tensor(want))


@pytest.mark.parametrize(("num_tokens", "window"), [(50, 1), (50, 13), (50, 50)])
def test_a_weight_is_the_share_of_queries_beyond_the_window(
    num_tokens: int, window: int
) -> None:
    position = torch.arange(num_tokens)
    distance = position[:, None] - position
    beyond = (distance >= window).sum(0) / (distance >= 0).sum(0)
    torch.testing.assert_close(position_weights(num_tokens, window), beyond.float())


def test_sinks_have_no_weight() -> None:
    plain, sinks = position_weights(20, 4), position_weights(20, 4, sinks=3)
    assert (plain[:3] > 0).all()
    assert (sinks[:3] == 0).all()
    assert torch.equal(sinks[3:], plain[3:])


def test_sparsity_is_the_chance_that_one_of_two_draws_keeps_a_token() -> None:
    g, w = gates(3, 2, 4, 20), position_weights(20, 4)
    s = 1 - (1 - g) ** 2
    torch.testing.assert_close(g + g * (1 - g), s)
    torch.testing.assert_close(sparsity(g, w), ((1 - w) + w * s).mean())


def test_bounds_of_sparsity() -> None:
    w = position_weights(20, 4)
    assert sparsity(torch.ones(2, 20), w) == 1
    torch.testing.assert_close(sparsity(torch.zeros(2, 20), w), 1 - w.mean())
    inside = position_weights(20, 20)
    torch.testing.assert_close(sparsity(gates(2, 20), inside), torch.tensor(1.0))


def test_gradient_of_sparsity() -> None:
    g, w = gates(2, 20).requires_grad_(), position_weights(20, 4)
    sparsity(g, w).backward()
    torch.testing.assert_close(g.grad, 2 * w * (1 - g.detach()) / g.numel())
    assert (g.grad[:, 16:] == 0).all()  # these never leave the window


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
