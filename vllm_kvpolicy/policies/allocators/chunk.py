"""ChunkKV: score_c = mean over the tokens of chunk c and over all KV heads of score_i.

Heads keep their must-keep tokens, then the best chunks whole, the same chunks in all
heads of a layer, then of one more chunk the tokens that score best in the head.

Source: ChunkKV (arXiv 2502.00299) section 3.2, algorithm 1;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/chunkkv_press.py.
Deviations: exactly K tokens (theirs a whole number of chunks); each request has its own
chunks (theirs are those of the batch's first). Chunks go by cache index, as theirs:
where heads have cut a chunk differently, one index names different tokens in them.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.ranking import limit_must_keep, rank_by, top_k_mask
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import Decision, EventInputs
from vllm_kvpolicy.policies.options import BaseOptions, Tokens
from vllm_kvpolicy.policies.ranks import Ranks
from vllm_kvpolicy.policies.words import RECENCY, BaseAllocator


class ChunkAllocator(BaseAllocator):
    """Keeps whole chunks of adjacent tokens."""

    summary = "the best chunks of adjacent tokens, the same in all heads of a layer"
    source = "ChunkKV, arXiv 2502.00299"
    reads_heads = False
    refuses = {"streaming": RECENCY}

    class Options(BaseOptions):
        chunk_length: Tokens = Field(20, description="tokens per chunk")

    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        """Pick `budget` tokens per row of `score` [E, L, H, T], must-keep first.

        The decision's score is the order of the chunks, so that pages fill up with
        more of the chunk that was cut.
        """
        held = inputs.valid if inputs.candidates is None else inputs.candidates
        chunk_rank = self._chunk_ranks(score, held, inputs.ranks)
        token = torch.arange(score.shape[-1], device=score.device)
        chunk = token // self.options.chunk_length
        of_token = chunk_rank[..., chunk].unsqueeze(2).expand(score.shape)
        last = chunk_rank.shape[-1]
        rank = rank_by(-of_token.masked_fill(~held, last), score)
        order = -rank.float()  # exact below 2^24
        must_keep = limit_must_keep(inputs.must_keep, budget)
        return Decision(top_k_mask(order, must_keep, inputs.valid, budget), order)

    def _chunk_ranks(self, score: Tensor, valid: Tensor, ranks: Ranks) -> Tensor:
        """Rank the chunks of each layer, [E, L, C] int64, 0 for the best.

        A chunk with a NaN is a NaN, and ranks as one.
        """
        total = self._sum(torch.where(valid, score.double(), 0.0))
        count = self._sum(valid.double())
        total, count = ranks.mean(torch.stack([total, count]))
        return rank_by(torch.zeros_like(count, dtype=torch.int64), total / count)

    def _sum(self, values: Tensor) -> Tensor:
        """Add up [E, L, H, T] over heads and each chunk's tokens, to [E, L, C]."""
        length = min(self.options.chunk_length, values.shape[-1])
        missing = -values.shape[-1] % length
        chunks = F.pad(values, (0, missing)).unflatten(-1, (-1, length))
        return chunks.sum((2, 4))
