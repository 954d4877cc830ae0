"""Keeps for each cached token until when it is visible, if an admission decides that.

One integer per slot of every head page: written in the forward pass, read at events and
by attention, moved along with survivors.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvpolicy.kernels.compact_pages import Moves
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.visibility import NEVER, until_attention, write_until
from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.policies.words import BaseAdmission
from vllm_kvpolicy.worker.batch import Batch
from vllm_kvpolicy.worker.captures.capture import Capture
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.step import Step, StepTokens
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch
from vllm_kvpolicy.worker.transfer import to_device


class VisibleUntil(Capture):
    """Keeps the first query position that no longer sees each cached token.

    A token whose decision is not known yet counts as kept. Slots that hold no token of
    a live request or a cached superblock have unspecified values.

    Args:
        num_sinks: tokens at positions below this are kept in any case.
        step_tokens: most tokens of a step, padding included.

    Attributes:
        until: [P, N] int32; made by `bind`.
    """

    holds = "decisions about tokens"

    @staticmethod
    def serves(needs: Needs) -> bool:
        return needs.until

    def __init__(
        self,
        decider: BaseAdmission,
        num_sinks: int,
        block_size: int,
        num_kv_heads: int,
        step_tokens: int,
        device: torch.device,
    ) -> None:
        self.decider, self.num_sinks = decider, num_sinks
        self._block_size = block_size
        # Distance in slots from a token in head 0 to the same token in each head.
        self._heads = torch.arange(num_kv_heads, device=device) * block_size
        # Slot of each token of the step in head 0 of layer 0; padding goes to vLLM's
        # null block. The addresses are fixed, for graphs.
        self._own = torch.zeros(step_tokens, dtype=torch.int64, device=device)
        self._governed = torch.zeros_like(self._own)
        self._position = torch.zeros_like(self._own)
        self.nbytes = 3 * self._own.nbytes + decider.nbytes
        self.pool: PagePool
        self.until: torch.Tensor

    def bind(self, pool: PagePool) -> None:
        shape, device = (len(pool.pages), pool.block_size), self._own.device
        self.until = torch.full(shape, NEVER, dtype=torch.int32, device=device)
        self.pool = pool

    def plan(self, step: Step) -> None:
        tokens = StepTokens.of(step.metadata)
        num_tokens, size = len(tokens.row), self._block_size
        blocks, stride = step.metadata.block_table_tensor, len(self._heads) * size

        def slots(position: torch.Tensor) -> torch.Tensor:
            place = position.clamp_min(0)
            block = blocks[tokens.row, place // size].long()
            exists = tokens.is_real & (position >= 0)
            return torch.where(exists, block * stride + place % size, 0)

        self._own[:num_tokens] = slots(tokens.position)
        self._governed[:num_tokens] = slots(tokens.position - self.decider.shift)
        self._position[:num_tokens] = tokens.position

    def end_step(self) -> None:
        self._own.zero_()
        self._governed.zero_()

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Let a layer's new tokens decide by their keys [T, H, D] or [T, H * D]."""
        num_tokens = len(key)
        position = self._position[:num_tokens]
        keys = key.view(num_tokens, len(self._heads), -1)
        write_until(
            self.until.view(-1),
            self.decider.decisions(layer, keys, position),
            self._own,
            self._governed,
            self._position,
            self._heads,
            layer * (self.until.numel() // self.pool.num_layers),
            self.decider.window,
            self.decider.shift,
            self.num_sinks,
        )

    def warm_up(self) -> None:
        """Write for a token that is nowhere."""
        shape = 1, len(self._heads), self.pool.head_dim
        key = torch.zeros(shape, dtype=self.pool.dtype, device=self._own.device)
        self.observe(0, key, key, key)

    def read(self, batch: Batch) -> Mapping[str, Any]:
        """Return until when the held tokens are visible; unspecified on padding."""
        heads = self.pool.num_layers, self.pool.num_heads
        pages = batch.held.pages.unflatten(1, heads)
        pools = [self.until[..., None]] * self.pool.num_layers
        held = PagedTokens(pools, pages, batch.held.max_tokens)
        return {"until": held.dense[..., 0]}

    def ends(self, step: Step) -> torch.Tensor:
        """Return [R * H] int32 position after the newest token of each row.

        Requests that are exempt see all that is held: theirs is 0.
        """
        ends = step.metadata.seq_lens[: step.metadata.num_reqs]
        exempt = step.commands.exempt
        rows = [n for n, name in enumerate(step.request_ids) if name in exempt]
        if rows:
            ends = ends.index_fill(0, to_device(rows, ends.device), 0)
        return ends.repeat_interleave(len(self._heads))

    def attend(
        self,
        layer: int,
        batch: FoldedBatch,
        queries: torch.Tensor,
        result: torch.Tensor,
        scale: float,
        max_queries: int,
    ) -> None:
        """Attend to what each query sees, in place of a stock kernel.

        Args:
            queries: [T * H, G, D] model dtype, folded.
            result: like `queries`, written.
        """
        width = -(-batch.max_length // self._block_size)
        # What is stored in an FP8 cache is to be multiplied; see `Float8`.
        key_scale, value_scale = (self.pool.scale(n, layer) for n in ("keys", "values"))
        until_attention(
            queries,
            self.pool.keys[layer],
            self.pool.values[layer],
            batch.tables[:, :width],
            batch.lengths,
            batch.query_start,
            batch.ends,
            self.until,
            scale * key_scale,
            result,
            max_queries,
        )
        if value_scale != 1:
            result *= value_scale

    def move(self, moves: Moves) -> None:
        until = self.until.view(-1)
        until[moves.dest] = until[moves.source]
