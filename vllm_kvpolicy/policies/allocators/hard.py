"""Hard-KV: a head keeps as many tokens as hold mass p of its raw attention.

K_w = min{k : the k largest of softmax(z_w) add up to p}, z_wi = max over group of
q_w . k_i * scale, for each query w of the window; v_i = number of w that have token i
among the first K_w. A head's size is the number of tokens with v_i >= 1 or to be kept
anyway, clamped to lower * K .. upper * K; sizes are then scaled to a mean of K over the
heads that share a budget, between the same bounds. Heads keep their best by v, then
score; with `merge` those take in what they replace, see `choose_merge`. With `order`
"calibrated" the largest K_w counts at a request's first event alone: tau is then found
so that the top-p set of softmax(f / tau) has as many tokens, f as `log_scores` has it,
and later sizes are that set's.

Source: Hard-KV, Problem 1, Constraint 1 and Cautious Update, as the paper has them; its
code, https://github.com/SuDIS-ZJU/HARDInfer, keeps equally many in all heads.
Deviations: no temperatures by default (theirs are found at a request's first event and
reused): a top-p set of the calibrated distribution is the first K_w in the method's
order, so sizes come from raw attention, at every event, and the order from the scorer.
One order for all rows makes the union as long as the largest K_w and votes fall with
rank; with `order` "attention" each row has its own.
W is 32, not 128. K is a mean over heads, not a cap on each, and the bounds are not the
paper's two thresholds: `upper` 4 is how far the widest head exceeds the mean in the
profile of the paper's P3 and code (twice in appendix B.2), `lower` the inverse (AdaKV
protects 0.2).
The preset "paper" has their temperatures, window and cap. It still differs: the scorer
gives one row of scores per head, so votes fall with rank; Solution 2's f for all
scorers (theirs has Solution 1 for SnapKV and H2O); no sparse tier.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.assign_pages import page_quota
from vllm_kvpolicy.kernels.nucleus import (
    nucleus_votes,
    row_nucleus_counts,
    temperatures,
)
from vllm_kvpolicy.kernels.ranking import (
    fill_in_order,
    limit_must_keep,
    rank_by,
    ranked_positions,
)
from vllm_kvpolicy.kernels.window_usage import WindowUsage, mean_over_group, measured
from vllm_kvpolicy.policies.base import Decision, EventInputs, Merge, Needs
from vllm_kvpolicy.policies.options import BaseOptions, Share, WindowOptions
from vllm_kvpolicy.policies.words import RECENCY, BaseAllocator

SHARE_UNIT = 16  # shares of the total are exact to 1/16 token
TEMPERATURE = "hard_temperature"  # name of a head's, in a policy's memory
LEAST = 1e-10  # beside shares of the score, before their logarithm
PAPER = {
    "window": 128,
    "hard_lower": 0.0,
    "hard_upper": 1.0,
    "hard_order": "calibrated",
    "hard_mode": "dynamic",
}
PRESETS = {"default": {}, "paper": PAPER}


class HardAllocator(BaseAllocator):
    """Sizes each head by how many keys hold most of its attention.

    Of the options, `window` is W and `hard_p` is p.
    """

    summary = "each head's size follows how many keys hold most of its attention"
    source = "Hard-KV"
    query_window = "window"
    ragged = True
    weighs_itself = True
    refuses = {"streaming": RECENCY}
    presets = PRESETS

    class Options(WindowOptions):
        preset: Literal["default", "paper"] = Field(
            "default",
            description="named set of defaults for the keys that are not given",
        )
        hard_p: float = Field(
            0.9,
            ge=0.01,
            le=1,
            description="attention mass that a nucleus covers (top-p)",
        )
        hard_lower: Share = Field(
            0.25, description="minimum size of a head, as a multiple of the budget"
        )
        hard_upper: float = Field(
            4.0,
            ge=1,
            le=1_000_000,
            description="maximum size of a head, as a multiple of the budget",
        )
        hard_order: Literal["method", "attention", "calibrated"] = Field(
            "method",
            description="order in which keys enter a nucleus: by the scorer's scores, "
            "or by each query's attention; `calibrated`: by the scores, which also "
            "size it, at a temperature from the request's first event",
        )
        hard_mode: Literal["fixed", "dynamic"] = Field(
            "fixed",
            description="fixed spends the whole budget, dynamic only what the nuclei "
            "need",
        )
        hard_scope: Literal["model", "layer"] = Field(
            "layer",
            description="heads that share a budget: all of the model, or those "
            "of one layer",
        )
        hard_merge: bool = Field(
            False, description="merge dropped tokens into kept tokens"
        )

    needs = Needs(keys=True)

    def __init__(self, options: BaseOptions) -> None:
        super().__init__(options)
        own = self.options
        by_attention = own.hard_order == "attention"  # each row in its own order
        self.needs |= Needs(
            usage=own.hard_merge or not by_attention,
            mass=0.0 if by_attention else own.hard_p,
            values=own.hard_merge,
            memory=(TEMPERATURE,) if own.hard_order == "calibrated" else (),
        )
        self.dynamic = own.hard_mode == "dynamic"

    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        """Pick L * H * `budget` tokens per event of `score` [E, L, H, T].

        Fewer where upper bounds or held tokens do not reach that, or if `dynamic`.
        """
        must_keep = limit_must_keep(inputs.must_keep, budget)
        score, order, candidates, memory = self._rank(score, inputs, usage)
        floors = must_keep.sum(-1).clamp(min=int(self.options.hard_lower * budget))
        floors = torch.minimum(floors, inputs.lengths)
        caps = inputs.lengths.clamp(max=int(self.options.hard_upper * budget))
        sizes = (candidates | must_keep).sum(-1).clamp(floors, caps)
        quota = self._scale(sizes, floors, caps, budget, score.shape[-1])
        keep = fill_in_order(must_keep, order, inputs.valid, quota)
        if not self.options.hard_merge:
            return Decision(keep, score, memory)
        merge = choose_merge(keep, score, inputs, measured(usage).mean)
        return Decision(keep, score, memory, merge=merge)

    def _rank(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return score, positions from best to worst, who has a vote, and memory."""
        if self.options.hard_order == "attention":
            queries = inputs.given("queries")[..., -self.needs.window_tokens :, :]
            window = (queries, inputs.given("keys"), inputs.lengths, inputs.scale)
            votes = nucleus_votes(*window, self.options.hard_p)
            if inputs.candidates is not None:
                votes = votes.masked_fill(~inputs.candidates, 0)
            score = -rank_by(votes, score).float()  # exact below 2^24
            return score, ranked_positions(score), votes > 0, {}
        order, nobody = ranked_positions(score), torch.zeros_like(inputs.must_keep)
        nucleus, memory = measured(usage).nucleus, {}
        if nucleus is None:
            raise ValueError("usage: expected nuclei, got None")
        size = nucleus[..., -self.needs.window_tokens :].amax(-1)
        if TEMPERATURE in self.needs.memory:
            size, tau = self._calibrated(score, inputs, size)
            memory = {TEMPERATURE: tau[..., None].expand(score.shape)}
        candidates = fill_in_order(nobody, order, inputs.valid, size)
        return score, order, candidates, memory

    def _calibrated(
        self, score: Tensor, inputs: EventInputs, longest: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return sizes, [E, L, H] int64 tokens, and temperatures, [E, L, H] float32.

        Found at a request's first event for sizes of `longest`, and remembered since.
        Where too few can be chosen from for that, as among few candidates, there is no
        temperature, 0, until a later event.
        """
        logits, mass = log_scores(score, inputs.valid), self.options.hard_p
        found = temperatures(logits, longest, mass)
        tau = inputs.memory[TEMPERATURE].amax(-1)
        tau = torch.where(tau > 0, tau, found)
        sizes = row_nucleus_counts(logits / tau.clamp(min=1e-3)[..., None], mass)
        return torch.where(tau > 0, sizes, longest), tau

    def _scale(
        self, sizes: Tensor, floors: Tensor, caps: Tensor, budget: int, num_tokens: int
    ) -> Tensor:
        """Scale the heads' sizes to a mean of `budget`, all [E, L, H] int64 tokens."""
        whole_model = self.options.hard_scope == "model"
        size, floor, cap = (
            part.flatten(1) if whole_model else part.flatten(0, 1)
            for part in (sizes, floors, caps)
        )
        total = torch.full_like(size[:, 0], size.shape[-1] * budget)
        if self.dynamic:
            total = torch.minimum(total, size.sum(-1))
        most = max(size.shape[-1] * budget, num_tokens)
        return scale_to(total, size, floor, cap, most).view_as(sizes)


def log_scores(score: Tensor, valid: Tensor) -> Tensor:
    """Return ln(u + 1e-10), u = (score - smallest) / (largest - smallest).

    Smallest and largest are finite; what is infinite counts as the largest.

    Source: Hard-KV, Solution 2, as the code has it for R-KV.
    Deviations: by the largest, not by the sum, which depends on the order of adding;
    a softmax of the logarithms is the same but for what 1e-10 adds.

    Args:
        score: [..., T] floating point; NaN, minus infinity and what stands for them
            among candidates, the lowest number, are left out.
        valid: [..., T] bool, False on padding.

    Returns:
        [..., T] float32, minus infinity for what is left out.
    """
    is_in, exact = valid & (score > torch.finfo(score.dtype).min), score.double()
    is_finite = is_in & (score < torch.inf)
    highest = torch.where(is_finite, exact, -torch.inf).amax(-1, keepdim=True)
    exact = exact.minimum(highest)
    lowest = torch.where(is_in, exact, torch.inf).amin(-1, keepdim=True)
    above = torch.where(is_in, exact - lowest, 0.0)
    largest = above.amax(-1, keepdim=True)
    share = torch.where(largest > 0, above / largest, 0.0)
    return torch.where(is_in, (share + LEAST).log(), -torch.inf).float()


def scale_to(
    total: Tensor, sizes: Tensor, floors: Tensor, caps: Tensor, most: int = 2**31
) -> Tensor:
    """Scale the sizes of each group's n heads until they add up to `total`.

    What floors and caps keep a head from giving or taking falls to the others evenly.

    Args:
        total: [G] int64 tokens, no number above `most`; all others [G, n].

    Returns:
        [G, n] int64 tokens between floors and caps that add up to `total`, or to the
        nearest sum that these allow; by largest remainder.
    """
    whole = sizes.sum(-1, keepdim=True).clamp(min=1)
    share = sizes * (total[:, None] * SHARE_UNIT) // whole
    return page_quota(share, floors, caps, total, SHARE_UNIT, SHARE_UNIT * most)


def choose_merge(
    keep: Tensor, order: Tensor, inputs: EventInputs, usage: Tensor
) -> Merge:
    """Pair survivors with dropped tokens of their head, no sinks or local tokens.

    a_i = attention to token i, mean over the window and over the group's query heads.
    Of m dropped tokens and n survivors, the r-th strongest survivor by a takes the r-th
    weakest, by the policy's order, of the min(m, n) best dropped tokens:
    k' = w k_s + (1 - w) k_d, v' = w v_s + (1 - w) v_d, w = a_s / (a_s + a_d).

    Source: Hard-KV, appendix G, pairwise merging at a fixed budget;
    https://github.com/SuDIS-ZJU/HARDInfer, where nothing reaches it.
    Deviations: a is the mean of the query heads' probabilities, not the softmax of
    their largest logit. With more dropped tokens than survivors the worst go unmerged.

    Args:
        keep: [E, L, H, T] bool, the policy's choice.
        order: [E, L, H, T] floating point, higher is kept sooner.
        usage: [E, L, Hq, T] float32, mean attention of the window.
    """
    attention = mean_over_group(usage, keep.shape[2])
    free = inputs.valid & ~inputs.must_keep
    weak = ~keep & (free if inputs.candidates is None else free & inputs.candidates)
    partner = pair_up(keep & free, weak, attention, order)
    other = attention.gather(-1, partner.clamp_min(0))
    total = attention + other
    weight = torch.where((partner < 0) | (total == 0), 1.0, attention / total)
    return Merge(partner, weight)


def pair_up(strong: Tensor, weak: Tensor, attention: Tensor, order: Tensor) -> Tensor:
    """Pair the r-th strong token with the r-th last of as many weak ones.

    For example strong tokens A, B, C by attention and weak ones x, y, z, u by order: u
    goes without, A takes z, B takes y and C takes x.

    Args:
        strong: [..., T] bool, ranked by attention [..., T] floating point.
        weak: [..., T] bool, ranked by order [..., T] floating point, NaN allowed; the
            worst of them go without.

    Returns:
        [..., T] int64, a token's partner, no token twice; -1 for none.
    """
    token = torch.arange(strong.shape[-1], device=strong.device)
    count = torch.minimum(strong.sum(-1), weak.sum(-1))[..., None]
    rank = rank_by(weak.long(), order)
    best_first = torch.empty_like(rank).scatter_(-1, rank, token.expand_as(rank))
    place = count - 1 - rank_by(strong.long(), attention)
    partner = best_first.gather(-1, place.clamp_min(0))
    return torch.where(strong & (place >= 0), partner, -1)
