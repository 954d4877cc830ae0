"""AdaKV: keep the H * K best tokens of a layer, whichever heads they belong to.

Each head first gets its must-keep tokens and the best a * K of its others, no more than
K in all; the rest of the layer's budget goes to the highest scores among all heads.

Source: Ada-KV (arXiv 2407.11550) section 3.2, algorithm 1;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/adakv_press.py.
Deviations: heads really end up with different lengths (kvpress overwrites the keys of
dropped tokens with ones that get no attention, and later events score those); the
must-keep set comes on top of a head's own share (theirs is part of it).
"""

from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.ranking import fill_next_best, limit_must_keep, top_k_mask
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import Decision, EventInputs
from vllm_kvpolicy.policies.options import BaseOptions, Share
from vllm_kvpolicy.policies.words import BaseAllocator

_ALIKE = "all KV heads get the same scores, which cannot divide the budget among them"
_SPREAD = "scores are distributed alike in all KV heads and cannot divide the budget"
_WITHIN = (
    "scores are relative to a block of one KV head and cannot be compared between "
    "heads, so they cannot divide the budget"
)


class AdaKVAllocator(BaseAllocator):
    """Shares a layer's budget among its heads by score; a is `adakv_floor`."""

    summary = "the best tokens of each layer, over all its heads"
    source = "Ada-KV, arXiv 2407.11550"
    ragged = True
    refuses = {
        **dict.fromkeys(("streaming", "tova", "rpc", "epikv"), _ALIKE),
        "lagkv": _WITHIN,
        "random": _SPREAD,
    }

    class Options(BaseOptions):
        adakv_floor: Share = Field(
            0.2, description="fraction of the budget reserved for each head"
        )

    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        """Pick H * `budget` tokens per layer of `score` [E, L, H, T], all if fewer."""
        must_keep = limit_must_keep(inputs.must_keep, budget)
        own = must_keep.sum(-1) + int(self.options.adakv_floor * budget)
        protected = top_k_mask(score, must_keep, inputs.valid, own.clamp(max=budget))
        # By token first: ties go to the later position, then to the later head.
        best = fill_next_best(
            _as_one_row(protected),
            _as_one_row(score),
            _as_one_row(inputs.valid),
            score.shape[2] * budget,
        )
        keep = best.unflatten(-1, (score.shape[3], score.shape[2])).transpose(-1, -2)
        return Decision(keep, score)


def _as_one_row(per_head: Tensor) -> Tensor:
    """Line up the tokens of a layer's heads, [E, L, H, T] to [E, L, T * H]."""
    return per_head.transpose(-1, -2).flatten(-2)
