"""Rolling statistics against loops; exact where results must not depend on the row."""

import math

import pytest
import torch
from torch import Tensor

from vllm_kvpolicy.policies.scorers._signals import rolling_mean, rolling_zscore

WINDOWS = (1, 2, 7, 64)
STATISTICS = {"mean": rolling_mean, "zscore": rolling_zscore}


def by_loop(name: str, row: list[float], first: int, window: int) -> list[float]:
    """The definition, one entry at a time."""
    result = []
    for index, value in enumerate(row):
        seen = row[max(first, index - window + 1) : index + 1]
        if index < first or (name == "zscore" and len(seen) < 2):
            result.append(0.0)
            continue
        mean = math.fsum(seen) / len(seen)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in seen) / len(seen))
        z = (value - mean) / (deviation + 1e-6)
        result.append(mean if name == "mean" else z)
    return result


def rows(seed: int = 0, size: int = 150) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, size, generator=generator) * 2 + 30


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", STATISTICS)
def test_equals_loops(name: str, window: int) -> None:
    values, first = rows(), torch.tensor([0, 5, 149])
    values[1, :5] = torch.nan  # does not exist, whatever it holds
    got = STATISTICS[name](values, first, window)
    assert got.dtype == torch.float64
    for row in range(3):
        want = by_loop(name, values[row].tolist(), int(first[row]), window)
        want = torch.tensor(want, dtype=torch.float64)
        torch.testing.assert_close(got[row], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", STATISTICS)
def test_neither_start_nor_end_of_a_row_matter(name: str, window: int) -> None:
    """Bit for bit: more entries before, behind or beside change nothing."""
    values, statistic = rows(1, 300), STATISTICS[name]
    whole = statistic(values, torch.tensor([20, 20, 20]), window)
    assert whole.abs().sum() > 0 or (name, window) == ("zscore", 1)
    for end in (90, 211, 300):
        part = statistic(values[1:2, 13:end], torch.tensor([7]), window)
        assert torch.equal(part[0], whole[1, 13:end])
    behind = values.clone()
    behind[:, 250:] = torch.inf
    changed = statistic(behind, torch.tensor([20, 20, 20]), window)
    assert torch.equal(changed[:, :250], whole[:, :250])


def test_equal_values_tie_at_zero() -> None:
    for value in (7.123, 1e4, 0.0):
        score = rolling_zscore(torch.full((1, 200), value), torch.tensor([3]), 50)
        assert (score == 0).all()


def test_no_sample_no_mean() -> None:
    values = rows(2, 10)
    assert (rolling_mean(values, torch.full((3,), 10), 4) == 0).all()


def test_steep_values_keep_their_deviation() -> None:
    """A mean 10,000 deviations away leaves 1e-6 of the z-score right."""
    values = (rows(3) - 30) + 2e4
    got = rolling_zscore(values, torch.zeros(3).long(), 64)[0]
    want = torch.tensor(by_loop("zscore", values[0].tolist(), 0, 64))
    torch.testing.assert_close(got, want.double(), rtol=1e-6, atol=1e-6)
