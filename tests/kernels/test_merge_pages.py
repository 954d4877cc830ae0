"""Mixing in place, and what must not change."""

import pytest
import torch

from vllm_kvpolicy.kernels.compact_pages import merge_pages

PAGES, BLOCK, SIZE = 6, 4, 8
SLOTS = torch.tensor([3, 17, 0, 8, 23])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_mixed_by_their_weights(dtype: torch.dtype) -> None:
    pages = drawn(PAGES, BLOCK, SIZE).to(dtype)
    others = drawn(len(SLOTS), SIZE, seed=1).to(dtype)
    before = pages.clone().flatten(0, 1)
    weight = drawn(len(SLOTS), seed=2).sigmoid()
    merge_pages(pages, SLOTS, others, weight)
    got, share = pages.flatten(0, 1), weight[:, None]
    want = share * before[SLOTS].float() + (1 - share) * others.float()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got[SLOTS].float(), want, rtol=tolerance, atol=tolerance)
    untouched = [slot for slot in range(PAGES * BLOCK) if slot not in SLOTS]
    assert torch.equal(got[untouched], before[untouched])
    assert (got[SLOTS] != before[SLOTS]).any(-1).all()


def test_whole_weights_leave_tokens_alone_whatever_the_others_are() -> None:
    pages = drawn(PAGES, BLOCK, SIZE)
    before = pages.clone()
    twice = torch.tensor([5, 0, 0, 11])
    others = torch.full((4, SIZE), torch.nan)
    merge_pages(pages, twice, others, torch.ones(4))
    assert torch.equal(pages, before)


def test_strided_pages_are_written_in_place() -> None:
    cache = drawn(PAGES, BLOCK, 2 * SIZE)
    keys, values = cache[..., :SIZE], cache[..., SIZE:].clone()
    merge_pages(keys, SLOTS, torch.zeros(len(SLOTS), SIZE), torch.zeros(len(SLOTS)))
    assert not cache.flatten(0, 1)[SLOTS, :SIZE].any()
    assert torch.equal(cache[..., SIZE:], values)
