"""The heads that a rank of a tensor-parallel group serves."""

import pytest
import torch

from vllm_kvpolicy.policies.ranks import HeadShard


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (1, [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (4, [[0], [1], [2], [3]]),
        (8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
    ],
)
def test_heads_of_a_rank(size: int, parts: list[list[int]]) -> None:
    kv, query = torch.arange(4).expand(3, 4), torch.arange(8)
    for rank, part in enumerate(parts):
        shard = HeadShard(num_heads=8, num_kv_heads=4, rank=rank, size=size)
        assert shard.kv_heads(kv, 1).tolist() == [part] * 3
        assert shard.kv_heads(kv.T, 0).tolist() == [[h] * 3 for h in part]
        both = [q for h in part for q in (2 * h, 2 * h + 1)]
        assert shard.query_heads(query, 0).tolist() == both
        assert shard.first_kv_head == part[0]
        assert shard.copies == max(1, size // 4)


@pytest.mark.parametrize("size", [3, 6])
def test_heads_that_cannot_be_shared_out(size: int) -> None:
    with pytest.raises(ValueError, match=f"got 4 KV heads on {size} ranks"):
        HeadShard(num_heads=24, num_kv_heads=4, size=size)
