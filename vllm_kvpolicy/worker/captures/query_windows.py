"""Saves the newest queries of requests that are about to have an event.

A small pool: only requests within W tokens of an event have a window, which the
scheduler hands out.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels.save_rows import save_rows
from vllm_kvpolicy.sizes import PlannerLimits
from vllm_kvpolicy.worker.batch import Batch
from vllm_kvpolicy.worker.captures.base import Capture
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.transfer import to_device


class QueryWindows(Capture):
    """A pool of query windows.

    Args:
        num_windows: windows that may be open at once.
        window_tokens: W, rows of a window; 0 where the policy needs no queries.
        num_layers, num_heads, head_dim: L, Hq and D of the model on this rank.
        step_tokens: most tokens of a step, padding included.
        dtype: the model's dtype.
        device: where the pool lives.
        is_captured: the attention of a step may be the replay of a graph, which then
            has to contain the saving of queries, whether any are planned or not.
    """

    def __init__(
        self,
        num_windows: int,
        window_tokens: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        step_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        is_captured: bool = False,
    ) -> None:
        self.window_tokens = window_tokens
        # The last row takes all queries that no window asks for.
        self._unwanted = num_windows * window_tokens
        shape = (num_layers, self._unwanted + 1, num_heads, head_dim)
        self.rows = torch.zeros(shape, dtype=dtype, device=device)
        self.targets = torch.full((step_tokens,), self._unwanted, device=device)
        self._is_captured = is_captured and bool(num_windows)
        self._is_planned = False

    @classmethod
    def of_engine(
        cls,
        limits: PlannerLimits,
        num_layers: int,
        layer: Any,
        vllm_config: Any,
        device: torch.device,
    ) -> "QueryWindows":
        """Size the pool for an engine.

        Args:
            limits: windows that the scheduler hands out.
            num_layers: L, layers of the model.
            layer: an attention layer of the model; all are of its shape.
            vllm_config: the engine's configuration.
            device: where the model runs.
        """
        return cls(
            limits.window_slots,
            limits.window_tokens,
            num_layers,
            layer.num_heads,
            layer.head_size,
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.model_config.dtype,
            device,
            compat.captures_attention(vllm_config),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.rows.nbytes

    def plan(self, step: Step) -> None:
        """Note which row of a window each token of the step goes to.

        Raises:
            KeyError: a command names a request that is not in the batch.
        """
        if not step.commands.captures:
            return
        query_start = step.metadata.query_start_loc_cpu.numpy()
        row_of = {request_id: row for row, request_id in enumerate(step.request_ids)}
        targets = np.full(query_start[-1], self._unwanted)
        for capture in step.commands.captures:
            first = int(query_start[row_of[capture.request_id]]) + capture.first_token
            target = capture.window_slot * self.window_tokens + capture.first_row
            end = target + capture.num_tokens
            targets[first : first + capture.num_tokens] = np.arange(target, end)
        self.targets[: len(targets)] = to_device(targets, self.rows.device)
        self._is_planned = True

    def end_step(self) -> None:
        """Save nothing until the next `plan`."""
        if self._is_planned:
            self.targets.fill_(self._unwanted)
        self._is_planned = False

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Save the planned tokens' queries [T, Hq, D] or [T, Hq * D] of one layer."""
        if self._is_planned or self._is_captured:
            assert len(query) <= len(self.targets), "more tokens than planned"
            rows = query.view(len(query), *self.rows.shape[2:])
            save_rows(self.rows[layer], rows, self.targets)

    def warm_up(self) -> None:
        """Save a query that no window asks for."""
        save_rows(self.rows[0], self.rows[0, -1:].clone(), self.targets)

    def read(self, batch: Batch) -> Mapping[str, Any]:
        """Return the newest queries of the batch's requests."""
        if not batch.policy.needs.window_tokens:
            return {}
        windows = [event.window_slot for event in batch.events]
        return {"queries": self.queries(to_device(windows, self.rows.device))}

    def queries(self, windows: torch.Tensor) -> torch.Tensor:
        """Return [E, L, Hq, W, D] queries of the windows [E] int64, newest last."""
        rows = self.rows[:, :-1].unflatten(1, (-1, self.window_tokens))[:, windows]
        return rows.permute(1, 0, 3, 2, 4)
