"""Hard-KV's Problem 1: calibrated counts equal raw counts, uncalibrated ones do not."""

import pytest
import torch
import torch.nn.functional as F

from support.calibrated_temperature import calibrate, top_mass
from vllm_kvpolicy.kernels.nucleus import nucleus_mask

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
