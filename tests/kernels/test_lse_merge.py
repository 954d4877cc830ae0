"""Merges are exact for the calibration query, and cost the entropy of the weights."""

import math

import pytest
import torch

from support.lse_merge import lse_merge

SIZE, SCALE = 16, 0.25


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of one query over keys [T, D]."""
    logits = keys @ query * SCALE + (0 if bias is None else bias)
    return torch.softmax(logits, 0) @ values, logits.logsumexp(0)


@pytest.mark.parametrize("seed", range(5))
def test_pair(seed: int) -> None:
    query, keys, values = drawn(SIZE, seed=seed), drawn(2, SIZE), drawn(2, SIZE, seed=9)
    logits = keys @ query * SCALE
    merged = lse_merge(keys, values, logits)
    share = float(torch.sigmoid(logits[0] - logits[1]))
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    output, lse = attend(query, keys, values)
    loss = lse - merged.key.double() @ query * SCALE
    assert float(loss) == pytest.approx(entropy, abs=1e-6)
    assert float(merged.deficit) == pytest.approx(entropy, abs=1e-6)
    assert 0 <= merged.deficit <= math.log(2) + 1e-6
    torch.testing.assert_close(merged.value.double(), output, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_with_its_bias_the_whole_output_is_unchanged(size: int) -> None:
    query, keys, values = drawn(SIZE), drawn(20, SIZE, seed=1), drawn(20, SIZE, seed=2)
    merged = lse_merge(keys[:size], values[:size], keys[:size] @ query * SCALE)
    fewer_keys = torch.cat([merged.key.double()[None], keys[size:]])
    fewer_values = torch.cat([merged.value.double()[None], values[size:]])
    bias = torch.zeros(len(fewer_keys), dtype=torch.float64)
    bias[0] = merged.deficit
    got, got_lse = attend(query, fewer_keys, fewer_values, bias)
    want, want_lse = attend(query, keys, values)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-6, atol=1e-6)
    unbiased, _ = attend(query, fewer_keys, fewer_values)
    assert (unbiased - want).abs().max() > 1e-4


def test_a_dominating_token_survives_as_it_is() -> None:
    keys, values = drawn(3, 2, SIZE), drawn(3, 2, SIZE, seed=1)
    logits = torch.tensor([[0.0, -math.inf]]).expand(3, 2)
    merged = lse_merge(keys, values, logits)
    assert torch.equal(merged.key, keys[:, 0].float())
    assert torch.equal(merged.value, values[:, 0].float())
    assert (merged.deficit == 0).all()


def test_equal_tokens_cost_the_logarithm_of_their_number() -> None:
    merged = lse_merge(drawn(5, SIZE), drawn(5, SIZE), torch.zeros(5))
    assert float(merged.deficit) == pytest.approx(math.log(5), abs=1e-6)
