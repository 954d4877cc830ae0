"""A worker's tables without data, of the sizes of real servers."""

from dataclasses import dataclass

import torch

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.compose import build
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.compaction import Compactor, remembered
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.equal import EqualTier, PhysicalTables
from vllm_kvpolicy.worker.tiers.head_tables import FoldedTables, HeadTables
from vllm_kvpolicy.worker.tiers.ragged import RaggedTier
from vllm_kvpolicy.worker.tiers.tier import Tier

META = torch.device("meta")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its server.

    Args:
        layers: L.
        heads: H, KV heads.
        group: G, query heads per KV head.
        dim: D.
        block_size: N.
        num_blocks: superblocks of the pool.
        requests: at once, at most.
        max_model_len: longest request.
    """

    layers: int
    heads: int
    group: int
    dim: int = 128
    block_size: int = 16
    num_blocks: int = 40_000
    requests: int = 64
    max_model_len: int = 8192


def launch_world(config: KVPolicyConfig, shape: Shape) -> Compactor:
    """Return the part of a worker that carries out events, on tensors without data.

    Args:
        config: of policies that need neither signals nor the rotary embedding.
        shape: of model and server.
    """
    size = shape.layers, shape.num_blocks, shape.heads, shape.block_size
    caches = torch.zeros(*size, 2 * shape.dim, dtype=torch.bfloat16, device=META)
    pool = PagePool(list(caches), False)
    policies = {
        name: build(name, config.resolved(name).options) for name in config.policies
    }
    longest = -(-config.budget_tokens // shape.block_size)
    requests = RequestTable(shape.requests, longest, shape.block_size, META)
    windows = QueryWindows(shape.group, 8192, META)
    windows.bind(pool)
    local = config.recent_tokens + shape.block_size - 1
    sizes = shape.num_blocks, shape.layers * shape.heads, local
    names = {each for policy in policies.values() for each in remembered(policy.needs)}
    return Compactor(
        policies=policies,
        pool=pool,
        tier=_tier(config.is_ragged, requests, pool, longest),
        requests=requests,
        captures=[windows],
        memory=SurvivorMemory(sorted(names), requests, *sizes),
        rope=None,
        scale=0.1,
    )


def _tier(
    is_ragged: bool, requests: RequestTable, pool: PagePool, longest: int
) -> Tier:
    if not is_ragged:
        return EqualTier(requests, pool, PhysicalTables(requests, 64, 512))
    first = pool.own_pages(torch.zeros(1, 1, dtype=torch.int64, device=META)).flatten()
    lists = HeadTables(requests.null_row, longest, first, pool.num_heads, META)
    room = FoldedTables(pool.num_layers, pool.num_heads, 64, 512, META)
    return RaggedTier(requests, pool, lists, room)
