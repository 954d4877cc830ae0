"""Hard-KV's Problem 1: tau so that the K largest of softmax(f / tau) hold mass p.

f is a method's logits, K the size of the nucleus of raw attention at mass p. With tau
solved per row the nucleus of the calibrated softmax has K tokens again, and it is the
first K by f; uncalibrated it has not. So `hard` takes the count from raw attention and
the order from f, and needs no tau.

Source: Hard-KV, Problem 1, Constraint 1 and algorithm 2;
https://github.com/SuDIS-ZJU/HARDInfer. Deviations: the largest K of the row, not the
first in the cache; the mass that the K largest raw weights really hold, p or a little
more; bisection over logarithms, a fixed number of steps, up to a tau of 1000 (theirs
ends at 1, too low where f is flatter than the raw logits).
"""

import math

import pytest
import torch
import torch.nn.functional as F

from vllm_kvpolicy.kernels.nucleus import nucleus_mask
from vllm_kvpolicy.kernels.ranking import ranked_positions

LOWEST, HIGHEST, STEPS = 1e-3, 1e3, 60


def calibrate(
    logits: torch.Tensor, raw: torch.Tensor, mass: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve each row for its temperature.

    Args:
        logits: [R, T] floating point, f; minus infinity on hidden tokens.
        raw: [R, T] floating point, raw attention logits, hidden likewise.
        mass: p, above 0, at most 1.

    Returns:
        tau [R] float64, within 0.001 to 1000; K [R] int64, tokens; and [R] float64,
        the mass of the K largest raw weights, which softmax(f / tau) gives its own.
    """
    count = nucleus_mask(raw, mass).sum(-1)
    target = top_mass(raw, count)
    low = torch.full_like(target, math.log(LOWEST))
    high = torch.full_like(target, math.log(HIGHEST))
    for _ in range(STEPS):
        middle = (low + high) / 2
        # A higher temperature flattens the row: its K largest hold less.
        is_sharp = top_mass(logits / middle.exp()[:, None], count) > target
        low = torch.where(is_sharp, middle, low)
        high = torch.where(is_sharp, high, middle)
    return low.exp(), count, target


def top_mass(logits: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the mass of the largest `count` [R] of softmax(logits [R, T]), float64."""
    probs = torch.softmax(logits.double(), dim=-1)
    probs = probs.gather(-1, ranked_positions(logits))
    rank = torch.arange(probs.shape[-1], device=probs.device)
    return probs.masked_fill(rank >= count[:, None], 0.0).sum(-1)


ROWS, TOKENS, POOL = 32, 800, 7


@pytest.fixture(scope="module")
def raw() -> torch.Tensor:
    """Heavy-tailed attention: one key in twenty stands out of a floor."""
    generator = torch.Generator().manual_seed(0)
    floor = torch.randn(ROWS, TOKENS, generator=generator)
    return floor + 5.0 * (torch.rand(ROWS, TOKENS, generator=generator) < 0.05)


@pytest.fixture(scope="module")
def pooled(raw: torch.Tensor) -> torch.Tensor:
    """The method: each key has the largest logit of its neighbourhood."""
    return F.max_pool1d(raw, POOL, stride=1, padding=POOL // 2)


@pytest.mark.parametrize("mass", [0.6, 0.9])
def test_calibrated_nucleus_has_the_raw_size(
    raw: torch.Tensor, pooled: torch.Tensor, mass: float
) -> None:
    tau, count, target = calibrate(pooled, raw, mass)
    assert torch.equal(count, nucleus_mask(raw, mass).sum(-1))
    assert ((target >= mass) & (target <= 1)).all()
    calibrated = pooled.double() / tau[:, None]
    torch.testing.assert_close(top_mass(calibrated, count), target)
    for row in range(ROWS):
        nucleus = nucleus_mask(calibrated[row], float(target[row]) - 1e-7)
        assert int(nucleus.sum()) == int(count[row])
    # The paper solves for p itself; a pool gives up to 7 keys the same logit.
    for_p = nucleus_mask(calibrated, mass).sum(-1)
    assert ((for_p <= count) & (for_p > count - POOL)).all()


def test_without_calibration_too_much_is_kept(
    raw: torch.Tensor, pooled: torch.Tensor
) -> None:
    count = nucleus_mask(raw, 0.6).sum(-1)
    uncalibrated = nucleus_mask(pooled, 0.6).sum(-1)
    assert (uncalibrated > 1.2 * count).all()


def test_identity_needs_no_temperature(raw: torch.Tensor) -> None:
    tau, _, _ = calibrate(raw, raw, 0.9)
    torch.testing.assert_close(tau, torch.ones_like(tau), rtol=1e-6, atol=0)


def test_hidden_tokens_take_no_part(raw: torch.Tensor) -> None:
    hidden = torch.arange(TOKENS) >= 300
    shown = raw.masked_fill(hidden, -torch.inf)
    tau, count, target = calibrate(shown * 2, shown, 0.9)
    alone = calibrate(raw[:, :300] * 2, raw[:, :300], 0.9)
    assert torch.equal(count, alone[1])
    torch.testing.assert_close((tau, target), (alone[0], alone[2]))
    torch.testing.assert_close(tau, torch.full_like(tau, 2.0), rtol=1e-6, atol=0)
