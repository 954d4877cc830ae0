"""Scorers and allocators in chunks: the same results, in no more memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.event_inputs import EVENTS, HEADS, LAYERS, TOKENS, make_inputs
from support.words import built
from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.policies.allocators.chunk import ChunkAllocator
from vllm_kvpolicy.policies.options import MOST_TOKENS
from vllm_kvpolicy.policies.ranks import ONE_RANK
from vllm_kvpolicy.policies.scorers.epikv import LagScorer, best_of_segments, lag_spread
from vllm_kvpolicy.policies.scorers.keydiff import KeyDiffScorer

SCORERS = {"keydiff": built(KeyDiffScorer), "lag-kv": LagScorer(16)}
SCORE = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
VALID = torch.ones_like(SCORE, dtype=torch.bool)
FLAT, HELD = SCORE.flatten(0, 1), VALID.flatten(0, 1)
STATES = SCORE[None, ..., None] * torch.arange(1, 9)
# What is computed of chunks that an option gives the length of.
MEASURES: dict[str, Callable[[int], Tensor]] = {
    "chunk": lambda length: built(ChunkAllocator, chunk_length=length)._chunk_ranks(
        SCORE[None], VALID[None], ONE_RANK
    ),
    "segment": lambda length: best_of_segments(
        FLAT, FLAT**2, HELD, HELD, length, (3, 5, 7)
    ),
    "lag": lambda length: lag_spread(STATES, VALID[None], length),
}


class Largest(TorchDispatchMode):
    """Notes the elements of the largest floating tensor that is made, views apart."""

    size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {part.untyped_storage().data_ptr() for part in _tensors(args)}
        for part in _tensors(result):
            is_new = part.untyped_storage().data_ptr() not in given
            if is_new and part.is_floating_point():
                self.size = max(self.size, part.numel())
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", SCORERS)
def test_keys_are_looked_at_a_few_layers_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch does not grow with events and layers."""
    scorer = SCORERS[name]
    inputs = make_inputs(scorer.needs)
    whole = scorer.score(inputs, None)
    keys = inputs.given("keys")
    assert keys.shape[:4] == (EVENTS, LAYERS, HEADS, TOKENS)
    for size in (4 * keys[0, 0].numel() * 4 * 2, 1):
        monkeypatch.setattr(chunks, "CPU_CHUNK_BYTES", size)
        with Largest() as largest:
            got = scorer.score(inputs, None)
        assert torch.equal(got[inputs.valid], whole[inputs.valid])
    # The last chunk of tokens is padded.
    most = keys[0, 0].numel() * (TOKENS + 16) // TOKENS
    assert 0 < largest.size <= most < EVENTS * LAYERS * keys[0, 0].numel() // 2


@pytest.mark.parametrize("name", MEASURES)
def test_a_chunk_longer_than_the_cache_is_the_cache(name: str) -> None:
    with Largest() as whole:
        expected = MEASURES[name](SCORE.shape[-1])
    with Largest() as largest:
        got = MEASURES[name](MOST_TOKENS)
    assert torch.equal(got, expected)
    assert largest.size == whole.size
