"""Chunks of (event, layer) pairs bound memory and change nothing."""

import pytest
import torch

from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.kernels.chunks import map_pairs


@pytest.mark.parametrize("pair_bytes", [1, 40, 100, 10**6])
def test_chunks_change_nothing(
    pair_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CPU_CHUNK_BYTES", 100)
    first, second = torch.rand(3, 2, 4, 5), torch.rand(3, 2, 5)
    sizes = []

    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sizes.append(len(a))
        return a.sum(1) + b

    got = map_pairs(add, pair_bytes, first, second)
    assert torch.equal(got, first.sum(2) + second)
    assert sum(sizes) == 6
    assert max(sizes) == min(6, max(1, 100 // pair_bytes))
