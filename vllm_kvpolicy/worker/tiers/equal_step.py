"""What attention kernels read in place of vLLM's block table and lengths.

Filled by worker.runtime once a step. The tensors stay where they are, so that a
captured graph reads what the step of its replay has put there.
"""

from typing import Any

import torch

from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels.page_tables import page_tables
from vllm_kvpolicy.worker.slots import SlotTable


class PhysicalTables:
    """Tables and lengths of the rows of a batch.

    Args:
        slots: superblocks of survivors, by slot.
        num_rows: most rows of a batch, padding included.
        num_columns: columns of vLLM's block table.
    """

    def __init__(self, slots: SlotTable, num_rows: int, num_columns: int) -> None:
        self.slots = slots
        shape = num_rows, num_columns
        self.tables = torch.zeros(shape, dtype=torch.int32, device=slots.device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=slots.device)

    @classmethod
    def of_engine(cls, slots: SlotTable, vllm_config: Any) -> "PhysicalTables":
        """Size the tables for an engine."""
        num_rows = compat.padded_rows(vllm_config)
        longest = vllm_config.model_config.max_model_len
        return cls(slots, num_rows, -(-longest // slots.block_size))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.tables.nbytes + self.lengths.nbytes

    def fill(
        self,
        rows: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put each row's global superblocks in front of its local ones.

        Args:
            rows: [R] int64, slots.
            block_table: [R, P] int32, vLLM's rows, indexed by logical position // N.
            seq_lens: [R] int32, tokens computed after the step.
            width: columns to fill, at most `num_columns`.

        Returns:
            [R, width] int32 superblocks and [R] int32 tokens held, views.
        """
        tables, lengths = self.tables[: len(rows), :width], self.lengths[: len(rows)]
        slots = self.slots
        survivors = slots.global_blocks, slots.num_global, slots.frontier_blocks
        page_tables(
            tables, lengths, rows, block_table, seq_lens, *survivors, slots.block_size
        )
        return tables, lengths
