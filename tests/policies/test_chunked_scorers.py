"""Scorers that look at keys: a few layers at a time, with the same result."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.event_inputs import EVENTS, HEADS, LAYERS, TOKENS, make_inputs
from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.policies.scorers.epikv import LagScorer
from vllm_kvpolicy.policies.scorers.keydiff import KeyDiffScorer

SCORERS = {"keydiff": KeyDiffScorer(), "lag-kv": LagScorer(16)}


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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", SCORERS)
def test_the_result_does_not_depend_on_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = SCORERS[name]
    inputs = make_inputs(scorer.needs)
    whole = scorer.score(inputs, None)
    for size in (1, 4 * inputs.given("keys")[0, 0].numel() * 4 * 2):
        monkeypatch.setattr(chunks, "CPU_CHUNK_BYTES", size)
        got = scorer.score(inputs, None)
        assert torch.equal(got[inputs.valid], whole[inputs.valid])


@pytest.mark.parametrize("name", SCORERS)
def test_scratch_does_not_grow_with_events_and_layers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CPU_CHUNK_BYTES", 1)
    scorer = SCORERS[name]
    inputs = make_inputs(scorer.needs)
    keys = inputs.given("keys")
    assert keys.shape[:4] == (EVENTS, LAYERS, HEADS, TOKENS)
    with Largest() as largest:
        scorer.score(inputs, None)
    # The last chunk of tokens is padded.
    most = keys[0, 0].numel() * (TOKENS + 16) // TOKENS
    assert 0 < largest.size <= most < EVENTS * LAYERS * keys[0, 0].numel() // 2
