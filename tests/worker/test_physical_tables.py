"""Tables and lengths that stay where they are, against lists of superblocks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from support.made_events import FIRST
from vllm_kvpolicy.protocol import NO_COMMANDS
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.tiers.equal import EqualTier, PhysicalTables
from vllm_kvpolicy.worker.transfer import to_device_together

SIZE, COLUMNS, CPU = 4, 8, torch.device("cpu")
NAMES = ["new", "old"]  # requests of the batch; a third row is padding
LENGTHS = [11, 29]


def make_slots() -> RequestTable:
    """One request has 24 tokens below its frontier and keeps two superblocks."""
    slots = RequestTable(2, 3, SIZE, CPU)
    event = replace(FIRST, position=26, dest_blocks=(9, 8), frontier_blocks=6)
    rows = [slots.take("old")]
    sent = to_device_together(slots.numbers(rows, [event]), CPU)
    slots.update(rows, [event], sent)
    return slots


def metadata(num_rows: int = 3) -> CommonAttentionMetadata:
    """A step of both requests and of padding, as vLLM describes it."""
    table = torch.zeros(num_rows, COLUMNS, dtype=torch.int32)
    table[0, :3] = torch.tensor([5, 6, 7])
    table[1] = torch.arange(40, 40 + COLUMNS)
    lengths = torch.tensor([*LENGTHS, 0][:num_rows], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 2][: num_rows + 1], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        max_seq_len=max(LENGTHS),
        num_reqs=num_rows,
        num_actual_tokens=2,
        max_query_len=1,
        block_table_tensor=table,
        slot_mapping=torch.zeros(2, dtype=torch.int64),
        causal=True,
    )


def make_tier(slots: RequestTable, is_captured: bool) -> EqualTier:
    """A tier over an empty cache."""
    pool = PagePool([torch.zeros(2, 1, SIZE, 2)], keys_are_columns=False)
    return EqualTier(slots, pool, PhysicalTables(slots, 4, COLUMNS), is_captured)


def physical(tier: EqualTier, common: CommonAttentionMetadata) -> Any:
    """Return what stock attention reads in a step of `NAMES`."""
    found = tier.metadata(Step(common, NAMES, NO_COMMANDS))
    assert found.folded is None and found.exact is None
    return found.common


def of_nobody(tier: EqualTier, common: CommonAttentionMetadata) -> Any:
    """Return what stock attention reads outside a step."""
    return tier.metadata(Step(common, (), NO_COMMANDS, is_real=False)).common


@pytest.mark.parametrize("is_captured", [False, True])
def test_survivors_stand_before_local_superblocks(is_captured: bool) -> None:
    found = physical(make_tier(make_slots(), is_captured), metadata())
    assert found.block_table_tensor[0, :3].tolist() == [5, 6, 7]
    # Survivors' superblocks, then the row from the frontier on.
    assert found.block_table_tensor[1, :4].tolist() == [9, 8, 46, 47]
    assert found.seq_lens.tolist() == [11, 29 - 4 * SIZE, 0]
    assert found.seq_lens_cpu_upper_bound.tolist() == [11, 13, 0]
    assert found.max_seq_len == 13 and found.block_table_tensor.shape == (3, 4)


def test_tables_stay_where_they_are() -> None:
    slots = make_slots()
    tier = make_tier(slots, True)
    first = physical(tier, metadata())
    slots.drop(["old"])
    other = physical(tier, metadata(2))
    for name in ("block_table_tensor", "seq_lens"):
        assert getattr(first, name).data_ptr() == getattr(other, name).data_ptr()
    assert first.block_table_tensor.stride() == other.block_table_tensor.stride()
    assert other.seq_lens.tolist() == LENGTHS
    assert torch.equal(other.block_table_tensor, metadata(2).block_table_tensor)


def test_what_is_captured_outside_steps_reads_our_tables() -> None:
    """Capture batches have no commands, and no request of theirs has a slot."""
    tier = make_tier(make_slots(), True)
    given = metadata().replace(max_seq_len=COLUMNS * SIZE)
    found = of_nobody(tier, given)
    assert found.block_table_tensor.data_ptr() == tier.tables.tables.data_ptr()
    assert torch.equal(found.block_table_tensor, given.block_table_tensor)
    assert torch.equal(found.seq_lens, given.seq_lens)
    assert found.max_seq_len == given.max_seq_len


def test_without_graphs_stock_metadata_stays() -> None:
    tier, given = make_tier(make_slots(), False), metadata()
    assert of_nobody(tier, given) is given
    tier = make_tier(RequestTable(2, 3, SIZE, CPU), False)
    assert physical(tier, given) is given
