"""Lets the ranks of vLLM's tensor-parallel group hear of each other at events.

All of them carry out the same events in the same order, so that their calls meet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.observe.trace_files import RANK, run_name
from vllm_kvpolicy.policies.fingerprint import fingerprint
from vllm_kvpolicy.policies.ranks import ONE_RANK, HeadShard, Ranks
from vllm_kvpolicy.sizes import own_shape, total_kv_heads

logger = init_logger("vllm.kv_policy")
MEETING_SECONDS = 60  # that a rank waits for those of other hosts at a start


class TensorParallelRanks(Ranks):
    """A tensor-parallel group of more than one rank.

    Args:
        group: of torch.distributed, on the device of the model.
    """

    def __init__(self, shard: HeadShard, group: Any) -> None:
        self.shard, self.group = shard, group

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total / self.shard.size

    def most(self, counts: torch.Tensor) -> torch.Tensor:
        largest = counts.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def queries_of_copies(self, queries: torch.Tensor) -> torch.Tensor:
        copies = self.shard.copies
        if copies == 1:
            return queries
        queries = queries.contiguous()
        size, first = self.shard.size, self.shard.rank // copies * copies
        gathered = queries.new_empty((size * len(queries), *queries.shape[1:]))
        dist.all_gather_into_tensor(gathered, queries, group=self.group)
        # [copies, E, L, Hq, W, D] to [E, L, copies * Hq, W, D]
        own = gathered.unflatten(0, (size, -1))[first : first + copies]
        return own.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)


def head_shard(vllm_config: Any, layer: Any) -> HeadShard:
    """Return the heads that this worker serves.

    Raises:
        ValueError: neither of KV heads and ranks divides the other, or the model
            shares its heads out in another way.
    """
    shape = own_shape(vllm_config)
    size = vllm_config.parallel_config.tensor_parallel_size
    shard = HeadShard(
        num_heads=shape.total_num_attention_heads,
        num_kv_heads=total_kv_heads(vllm_config),
        rank=get_tp_group().rank_in_group if size > 1 else 0,
        size=size,
    )
    found = layer.num_heads, layer.num_kv_heads
    expected = shard.num_heads // shard.size, max(1, shard.num_kv_heads // shard.size)
    if found != expected:
        raise ValueError(
            f"attention layers have {found[0]} query heads and {found[1]} KV heads on "
            f"rank {shard.rank} of {shard.size}, expected {expected[0]} and "
            f"{expected[1]} of the model's {shard.num_heads} and {shard.num_kv_heads}"
        )
    return shard


def ranks_of(shard: HeadShard, device: torch.device) -> Ranks:
    """Return the group of this worker, once it has met there."""
    if shard.size == 1:
        return ONE_RANK
    ranks = TensorParallelRanks(shard, get_tp_group().device_group)
    # Buffers of the group's first meeting are then in vLLM's measure of free memory.
    ranks.most(torch.zeros(1, dtype=torch.int64, device=device))
    return ranks


def trace_name(shard: HeadShard, engine: int) -> str | None:
    """Return the name of this worker's folder in a trace; all ranks have to ask.

    Args:
        engine: index of its engine among data-parallel ones.

    Returns:
        None for copies of heads that another rank records.
    """
    if shard.size == 1:
        return run_name(engine)
    run = get_tp_group().broadcast_object(run_name(engine))
    place, is_copy = divmod(shard.rank, shard.copies)
    if is_copy:
        return None
    return f"{run}/{RANK.format(place, shard.size // shard.copies)}"


@contextmanager
def ends_its_rank(shard: HeadShard) -> Iterator[None]:
    """End the process of a rank that fails alone.

    vLLM hears of errors of the first rank only. Another one would go on to its next
    step without what this one leaves, while the others wait for it.

    Raises:
        SystemExit: for any error inside, on ranks that vLLM does not hear.
    """
    try:
        yield
    except Exception as error:
        if not shard.rank:
            raise
        logger.exception("rank %d cannot go on", shard.rank)
        raise SystemExit(1) from error


def check_hosts(vllm_config: Any, config: KVPolicyConfig) -> None:
    """Check that ranks on other hosts serve the same policies.

    Each host has a command line and files of its own. Before the model is loaded, so
    that the hosts are about equally far.

    Raises:
        ValueError: a rank has other policies or none.
    """
    if vllm_config.parallel_config.nnodes == 1:
        return
    group, advice = get_tp_group(), "give all hosts the same --kv-* flags and files"
    try:
        dist.monitored_barrier(group.cpu_group, timedelta(seconds=MEETING_SECONDS))
    except RuntimeError as error:
        raise ValueError(
            f"--kv-policy {config.policy}: ranks on other hosts have no policy, or did "
            f"not get here within {MEETING_SECONDS} s; {advice} ({error})"
        ) from None
    # All ranks meet where one of them records a trace.
    known = fingerprint(config), config.trace_dir is not None
    found: list[Any] = [None] * group.world_size
    dist.all_gather_object(found, known, group=group.cpu_group)
    others = [rank for rank, each in enumerate(found) if each != found[0]]
    if others:
        raise ValueError(
            f"--kv-policy {config.policy}: ranks {others} have other policies, options "
            f"or files than rank 0; {advice}"
        )
