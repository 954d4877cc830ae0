"""Saves the newest queries of requests that are about to have an event.

They are kept in superblocks of the KV cache, which the scheduler lends to a request
from the first query that its event reads until the event. So they take memory only
while they are needed, and there is no limit but the pool to how many requests save.

Attention kernels multiply what lies behind a request's last token by zero. Bytes of a
query may be NaN or infinity as numbers of an FP8 cache, so there a superblock is set to
zeros before anybody else gets it: when its event has read it, or its request is gone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vllm_kvpolicy.kernels.save_rows import save_rows
from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch
from vllm_kvpolicy.worker.captures.capture import Capture
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.transfer import Integers, to_device

UNWANTED = 0  # a row of vLLM's null block


class QueryWindows(Capture):
    """Keeps query windows in superblocks.

    A layer's part of a superblock is 2N rows of H * D numbers. A query of all heads is
    Hq * D numbers, so it takes G = Hq / H rows, and a window of W queries takes the
    first W * G rows of its superblocks. Queries keep the model's dtype: where the cache
    has smaller numbers, a query takes as many times more rows.

    Example: N = 16, H = 3, Hq = 9. A query takes 3 of a superblock's 32 rows, so that
    the eleventh begins in the first superblock and ends in the second. In an FP8 cache
    of a model in bfloat16 it takes 6 rows.

    Args:
        num_parts: rows that a query takes; see `sizes.query_rows`.
        step_tokens: most tokens of a step, padding included.
        is_captured: the attention of a step may be the replay of a graph, which then
            has to contain the saving of queries, whether any are planned or not.
        turn: what saved queries [L, M, ...] become when they are read, [L, M, Hq, D];
            None where they are read as they were saved.
    """

    holds = "places of queries"

    @staticmethod
    def serves(needs: Needs) -> bool:
        return needs.window_tokens > 0

    pool: PagePool

    def __init__(
        self,
        num_parts: int,
        step_tokens: int,
        device: torch.device,
        is_captured: bool = False,
        turn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        shape = (step_tokens, num_parts)
        self.targets = torch.full(shape, UNWANTED, dtype=torch.int64, device=device)
        self.nbytes, self._turn = self.targets.nbytes, turn
        self._is_captured, self._is_planned = is_captured, False
        self._lent: dict[str, tuple[int, ...]] = {}  # superblocks with queries

    def bind(self, pool: PagePool) -> None:
        self.pool = pool

    def plan(self, step: Step) -> None:
        """Note which rows of a window each token of the step goes to.

        Raises:
            KeyError: a command names a request that is not in the batch.
        """
        if not step.commands.captures:
            return
        query_start = step.metadata.query_start_loc_cpu.numpy()
        row_of = {request_id: row for row, request_id in enumerate(step.request_ids)}
        num_parts = self.targets.shape[1]
        targets = np.full((query_start[-1], num_parts), UNWANTED)
        for capture in step.commands.captures:
            first = int(query_start[row_of[capture.request_id]]) + capture.first_token
            part = capture.first_row * num_parts + np.arange(
                capture.num_tokens * num_parts
            )
            self._lent[capture.request_id] = capture.window_blocks
            rows = self._rows(np.array(capture.window_blocks), part)
            targets[first : first + capture.num_tokens] = rows.reshape(-1, num_parts)
        self.targets[: len(targets)] = to_device(targets, self.targets.device)
        self._is_planned = True

    def end_step(self) -> None:
        if self._is_planned:
            self.targets.fill_(UNWANTED)
        self._is_planned = False

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Save the planned tokens' queries [T, Hq, D] or [T, Hq * D] of one layer."""
        if self._is_planned or (self._is_captured and self._is_capturing()):
            assert len(query) <= len(self.targets), "more tokens than planned"
            rows = self.pool.vectors[layer]
            query = query.reshape(len(query), -1).view(rows.dtype)
            unused = self.targets.shape[1] * rows.shape[1] - query.shape[1]
            save_rows(
                rows, F.pad(query, (0, unused)) if unused else query, self.targets
            )

    def _is_capturing(self) -> bool:
        """Return whether this pass becomes a graph; on a CPU, as if it did."""
        is_cuda = self.targets.is_cuda
        return not is_cuda or torch.cuda.is_current_stream_capturing()

    def warm_up(self) -> None:
        """Save a query that no window asks for."""
        rows = self.pool.vectors[0]
        query = rows[UNWANTED].repeat(1, self.targets.shape[1])
        save_rows(rows, query, self.targets)

    def numbers(
        self, events: Sequence[CompactEvent], needs: Needs
    ) -> dict[str, Integers]:
        part = np.arange(needs.window_tokens * self.targets.shape[1])
        blocks = np.array([event.window_blocks for event in events])
        return {"window_rows": self._rows(blocks, part)}

    def read(self, batch: Batch) -> Mapping[str, Any]:
        window_tokens = batch.policy.needs.window_tokens
        return {"queries": self.queries(batch.sent["window_rows"], window_tokens)}

    def forget_windows(self, events: Sequence[CompactEvent]) -> None:
        self.drop([event.request_id for event in events])

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget windows; leave no query in the superblocks of an FP8 cache."""
        lent = [self._lent.pop(request_id, ()) for request_id in request_ids]
        if self.pool.float8 is not None and any(lent):
            blocks = np.concatenate([np.array(each, dtype=np.int64) for each in lent])
            self.pool.clear(to_device(blocks, self.targets.device))

    def queries(self, rows: torch.Tensor, window_tokens: int) -> torch.Tensor:
        """Return [E, L, Hq, W, D] queries, newest last.

        Args:
            rows: [E, W * G] int64, where the parts of each window are; see `numbers`.
        """
        saved = self.pool.vectors.index_select(1, rows.flatten())
        saved = saved.flatten(1).view(self.pool.dtype)
        shape = (len(saved), len(rows), window_tokens, -1, self.pool.head_dim)
        if self._turn is not None:
            saved = self._turn(saved.view(len(saved), len(rows) * window_tokens, -1))
        return saved.view(shape).permute(1, 0, 3, 2, 4)

    def _rows(self, blocks: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Return [..., M] rows of parts [M] of windows with superblocks [..., m]."""
        per_block = 2 * self.pool.block_size
        return blocks[..., part // per_block] * per_block + part % per_block
