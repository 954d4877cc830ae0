"""One forward pass: its batch, what the scheduler asks of it, and its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvpolicy.protocol import StepCommands


@dataclass(frozen=True)
class Step:
    """A batch as vLLM describes it, with the scheduler's commands.

    Args:
        metadata: vLLM's CommonAttentionMetadata with logical lengths.
        request_ids: requests of the batch in row order; rows beyond are padding.
        is_real: False where vLLM builds metadata for a dummy batch, as it does to
            capture a graph; there are no request ids and no commands then.
    """

    metadata: Any
    request_ids: Sequence[str]
    commands: StepCommands
    is_real: bool = True


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
        """Locate the tokens of a step; does not wait for the device."""
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
