"""Softmax over some of a row's tokens."""

import torch

from vllm_kvpolicy.kernels.softmax import masked_softmax


def test_shares_one_unit_among_the_tokens_of_the_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(4, 50, generator=generator)
    mask = torch.rand(4, 50, generator=generator) < 0.5
    logits[:, 7], mask[:, 7] = torch.nan, False
    logits[:, 9], mask[:, 9] = torch.inf, False
    got = masked_softmax(logits, mask)
    for row, shown, probs in zip(logits, mask, got, strict=True):
        want = torch.softmax(row[shown].double(), 0).float()
        torch.testing.assert_close(probs[shown], want)
        assert (probs[~shown] == 0).all()


def test_a_row_without_tokens_is_zero() -> None:
    logits, mask = torch.randn(3, 8), torch.zeros(3, 8, dtype=torch.bool)
    assert (masked_softmax(logits, mask) == 0).all()


def test_small_weights_are_kept_and_broken_logits_take_nothing_from_others() -> None:
    logits = torch.tensor(
        [[0.0, -80.0, torch.nan, -torch.inf], [0.0, 1.0, torch.inf, 2.0]]
    )
    got = masked_softmax(logits, torch.ones(2, 4, dtype=torch.bool))
    small = torch.exp(torch.tensor(-80.0))
    torch.testing.assert_close(
        got[0], torch.tensor([1.0, small, 0.0, 0.0]), rtol=1e-5, atol=0
    )
    assert got[1].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_padding_does_not_change_it() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(64, 1000, dtype=torch.bool)
    want = masked_softmax(logits, mask)
    padded = torch.nn.functional.pad(logits, (0, 37), value=torch.nan)
    got = masked_softmax(padded, torch.nn.functional.pad(mask, (0, 37)))
    assert torch.equal(got[:, :1000], want)
