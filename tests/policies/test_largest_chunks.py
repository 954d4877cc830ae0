"""Chunks longer than the cache take no more memory than the cache does."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_kvpolicy.policies.allocators.chunk import ChunkAllocator
from vllm_kvpolicy.policies.options import MOST_TOKENS
from vllm_kvpolicy.policies.ranks import ONE_RANK
from vllm_kvpolicy.policies.scorers.epikv import best_of_segments, lag_spread

TOKENS = 50
SCORE = torch.rand(2, 3, TOKENS, generator=torch.Generator().manual_seed(0))
VALID = torch.ones(2, 3, TOKENS, dtype=torch.bool)
STATES = SCORE[None, ..., None] * torch.arange(1, 9)


class Largest(TorchDispatchMode):
    """Notes the most entries of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.entries = max(self.entries, made.numel())
        return made


def chunk_ranks(length: int) -> torch.Tensor:
    allocator = ChunkAllocator(chunk_length=length)
    return allocator._chunk_ranks(SCORE[None], VALID[None], ONE_RANK)


def best(length: int) -> torch.Tensor:
    score, valid = SCORE.flatten(0, 1), VALID.flatten(0, 1)
    return best_of_segments(score, score**2, valid, valid, length, (3, 5, 7))


def spread(length: int) -> torch.Tensor:
    return lag_spread(STATES, VALID[None], length)


@pytest.mark.parametrize("measure", [chunk_ranks, best, spread])
def test_a_chunk_longer_than_the_cache_is_the_cache(measure: Any) -> None:
    with Largest() as whole:
        expected = measure(TOKENS)
    with Largest() as largest:
        got = measure(MOST_TOKENS)
    assert torch.equal(got, expected)
    assert largest.entries == whole.entries
