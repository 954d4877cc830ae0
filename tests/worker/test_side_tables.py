"""Memory beside the KV cache, for models whose tables nobody can allocate here."""

from dataclasses import replace

import pytest
import torch

from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.setup import LISTS, VALUES, SideTables
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.head_tables import HeadTables

GIB = 2**30
# 80 layers, 8 KV heads of 128 channels in bf16, 256 requests of up to 128k tokens.
HEADS, SIZE, SLOTS = 80 * 8, 32, 256
SUPERBLOCK = HEADS * SIZE * 2 * 128 * 2
LARGE = SideTables(
    num_requests=SLOTS,
    num_heads=HEADS,
    block_size=SIZE,
    max_local_tokens=32 + SIZE - 1,
    num_memories=1,
    is_ragged=False,
)
CASES = {
    "equal": LARGE,
    "no memory": replace(LARGE, num_memories=0),
    "two memories": replace(LARGE, num_memories=2),
    "ragged": replace(LARGE, is_ragged=True),
    "bounds": replace(LARGE, is_ragged=True, page_bytes=2 * 128 * 2),
    "ragged, many requests": replace(LARGE, is_ragged=True, num_requests=8192),
}


def test_the_memory_follows_the_pool_and_not_the_longest_prompt() -> None:
    """Four bytes to 512 of a token's key and value, and the local tokens."""
    num_blocks = 60 * GIB // SUPERBLOCK
    local = 4 * SLOTS * HEADS * LARGE.max_local_tokens
    assert LARGE.nbytes(num_blocks) == num_blocks * SUPERBLOCK // 128 + local
    assert LARGE.nbytes(num_blocks) < 0.6 * GIB


def test_bounds_take_a_key_and_a_value_of_each_page() -> None:
    """One N-th of the KV cache."""
    more = CASES["bounds"].nbytes(500) - CASES["ragged"].nbytes(500)
    assert more == 500 * SUPERBLOCK // SIZE


@pytest.mark.parametrize("available", [-5, 0, SUPERBLOCK, GIB, 7 * GIB, 60 * GIB])
@pytest.mark.parametrize("name", CASES)
def test_pool_and_tables_fill_what_there_is(name: str, available: int) -> None:
    tables = CASES[name]
    count = tables.pool_blocks(available, SUPERBLOCK)

    def total(num_blocks: int) -> int:
        return num_blocks * SUPERBLOCK + tables.nbytes(num_blocks)

    assert count == 0 or total(count) <= available
    assert total(count + 1) > available


def test_tables_take_what_was_announced() -> None:
    cpu, own = torch.device("cpu"), torch.arange(6)
    requests = RequestTable(3, 8, 4, cpu)
    memory = SurvivorMemory(("a", "b"), requests, 25, 6, 7)
    lists = HeadTables(requests, 25, own, 1)
    announced = SideTables(3, 6, 4, 7, 2, is_ragged=True).parts(25)
    assert memory.survivors.nbytes + memory.local.nbytes == announced[VALUES]
    assert lists.pages.nbytes + lists.first.nbytes == announced[LISTS]
