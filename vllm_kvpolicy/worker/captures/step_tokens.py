"""Which request and which position each token of a step belongs to, on the device."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step, padding included.

    Args:
        row: [T] int64, row of the batch; any row on padding.
        position: [T] int64, logical position in its request; 0 on padding.
        is_real: [T] bool, False on padding.
        is_first: [T] bool, first of its request in this step.
        is_last: [T] bool, last of its request in this step.
    """

    row: torch.Tensor
    position: torch.Tensor
    is_real: torch.Tensor
    is_first: torch.Tensor
    is_last: torch.Tensor

    @classmethod
    def of(cls, metadata: Any) -> "StepTokens":
        """Locate the tokens of a step; does not wait for the device.

        Args:
            metadata: vLLM's CommonAttentionMetadata with logical lengths.
        """
        num_rows, num_tokens = metadata.num_reqs, metadata.num_actual_tokens
        start = metadata.query_start_loc[: num_rows + 1]
        token = torch.arange(num_tokens, dtype=start.dtype, device=start.device)
        row = torch.searchsorted(start[1:], token, right=True).clamp_max(num_rows - 1)
        is_real = token < start[-1]
        to_end = start[row + 1] - token
        position = torch.where(is_real, metadata.seq_lens[row] - to_end, 0)
        return cls(
            row=row,
            position=position.long(),
            is_real=is_real,
            is_first=token == start[row],
            is_last=is_real & (to_end == 1),
        )
