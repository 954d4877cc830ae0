"""The newest queries of requests that are about to have an event.

Filled inside the attention forward, read at the event. A small pool: only requests
within W tokens of an event have a slot, which the scheduler hands out.
Process: worker
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_kvpolicy.attention.staging import to_device
from vllm_kvpolicy.protocol import WindowCapture


class QueryWindows:
    """A pool of query windows.

    Args:
        num_slots: windows that may be open at once.
        window_tokens: W, rows of a window; 0 where the policy needs no queries.
        num_layers, num_heads, head_dim: L, Hq and D of the model on this rank.
        dtype: the model's dtype.
        device: where the pool lives.
    """

    def __init__(
        self,
        num_slots: int,
        window_tokens: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window_tokens = window_tokens
        shape = (num_layers, num_slots * window_tokens, num_heads, head_dim)
        self.rows = torch.zeros(shape, dtype=dtype, device=device)
        self._tokens: torch.Tensor | None = None
        self._targets: torch.Tensor | None = None

    def plan(
        self,
        captures: Sequence[WindowCapture],
        request_ids: Sequence[str],
        query_start: np.ndarray,
    ) -> None:
        """Translate the step's captures into token and row indices.

        Args:
            captures: what the scheduler asked for.
            request_ids: requests of the batch in row order.
            query_start: [rows + 1] first token of each row, host memory.

        Raises:
            KeyError: a capture names a request that is not in the batch.
        """
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        tokens, targets = [], []
        for capture in captures:
            first = int(query_start[row_of[capture.request_id]]) + capture.first_token
            target = capture.window_slot * self.window_tokens + capture.first_row
            tokens.append(np.arange(first, first + capture.num_tokens))
            targets.append(np.arange(target, target + capture.num_tokens))
        if tokens:
            device = self.rows.device
            self._tokens = to_device(np.concatenate(tokens), device)
            self._targets = to_device(np.concatenate(targets), device)

    def forget_plan(self) -> None:
        """Capture nothing until the next `plan`."""
        self._tokens = self._targets = None

    def capture(self, layer: int, query: torch.Tensor) -> None:
        """Save the planned tokens' queries of one layer.

        Args:
            layer: index of the layer in model order.
            query: [tokens, Hq, D] or [tokens, Hq * D], post-RoPE.
        """
        if self._tokens is not None:
            rows = query.view(len(query), *self.rows.shape[2:])[self._tokens]
            self.rows[layer].index_copy_(0, self._targets, rows)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Return [E, L, Hq, W, D] queries of the windows [E] int64, newest last."""
        windows = self.rows.unflatten(1, (-1, self.window_tokens))[:, slots]
        return windows.permute(1, 0, 3, 2, 4)
