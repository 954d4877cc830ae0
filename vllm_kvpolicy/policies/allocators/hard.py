"""Hard-KV: a head keeps as many tokens as hold mass p of its raw attention.

K_w = min{k : the k largest of softmax(z_w) add up to p}, z_wi = max over group of
q_w . k_i * scale, for each query w of the window; v_i = number of w that have token i
among the first K_w. A head's size is the number of tokens with v_i >= 1 or to be kept
anyway, clamped to lower * K .. upper * K; sizes are then scaled to a mean of K over the
heads that share a budget, between the same bounds. Heads keep their best by v, then
score; with `merge` those take in what they replace, see policies.allocators.merging.

Source: Hard-KV, Problem 1, Constraint 1 and Cautious Update, as the paper has them; its
code, https://github.com/SuDIS-ZJU/HARDInfer, keeps equally many in all heads.
Deviations: no temperatures: a top-p set of the calibrated distribution is the first K_w
in the method's order, so sizes come from raw attention and the order from the scorer
(tests solve for the temperatures and compare). One order for all rows makes the union
as long as the largest K_w and votes fall with rank; with `order` "attention" each row
has its own.
W is 32, not 128. K is a mean over heads, not a cap on each: `upper` 4 is how far the
widest head exceeds the mean in the paper's profile of head sizes, `lower` the inverse
(AdaKV protects 0.2).
"""

import torch

from vllm_kvpolicy.kernels.assign_pages import page_quota
from vllm_kvpolicy.kernels.nucleus import nucleus_votes
from vllm_kvpolicy.kernels.ranking import (
    fill_in_order,
    limit_must_keep,
    rank_by,
    ranked_positions,
)
from vllm_kvpolicy.kernels.window_usage import WindowUsage, measured
from vllm_kvpolicy.policies.allocators.merging import choose_merge
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs

SHARE_UNIT = 16  # shares of the total are exact to 1/16 token


class HardAllocator:
    """Sizes each head by how many keys hold most of its attention.

    Args:
        window: W, newest queries that count.
        hard_p: p, attention mass of a nucleus.
        hard_lower: smallest size of a head, in budgets.
        hard_upper: largest size of a head, in budgets.
        hard_order: "method" or "attention".
        hard_mode: "fixed", or "dynamic": sizes are only scaled down, so that the
            budget is a bound and not a target.
        hard_scope: "model" or "layer", the heads that share a budget.
        hard_merge: merge dropped tokens into survivors.
    """

    def __init__(
        self,
        window: int,
        hard_p: float,
        hard_lower: float,
        hard_upper: float,
        hard_order: str,
        hard_mode: str,
        hard_scope: str,
        hard_merge: bool,
    ) -> None:
        own_order = hard_order == "attention"  # each row's nucleus in its own order
        self.needs = Needs(
            window_tokens=window,
            usage=hard_merge or not own_order,
            mass=0.0 if own_order else hard_p,
            keys=True,
            values=hard_merge,
        )
        self.mass = hard_p
        self.lower = hard_lower
        self.upper = hard_upper
        self.order = hard_order
        self.scope = hard_scope
        self.dynamic = hard_mode == "dynamic"
        self.merge = hard_merge

    def choose(
        self,
        score: torch.Tensor,
        inputs: EventInputs,
        usage: WindowUsage | None,
        budget: int,
    ) -> Decision:
        """Pick L * H * `budget` tokens per event of `score` [E, L, H, T].

        Fewer where upper bounds or held tokens do not reach that, or if `dynamic`.
        """
        must_keep = limit_must_keep(inputs.must_keep, budget)
        score, order, candidates = self._rank(score, inputs, usage)
        floors = must_keep.sum(-1).clamp(min=int(self.lower * budget))
        floors = torch.minimum(floors, inputs.lengths)
        caps = inputs.lengths.clamp(max=int(self.upper * budget))
        sizes = (candidates | must_keep).sum(-1).clamp(floors, caps)
        quota = self._scale(sizes, floors, caps, budget, score.shape[-1])
        keep = fill_in_order(must_keep, order, inputs.valid, quota)
        if not self.merge:
            return Decision(keep, score)
        merge = choose_merge(keep, score, inputs, measured(usage).mean)
        return Decision(keep, score, merge=merge)

    def _rank(
        self, score: torch.Tensor, inputs: EventInputs, usage: WindowUsage | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return score, positions from best to worst and who has a vote."""
        if self.order == "attention":
            queries = inputs.given("queries")[..., -self.needs.window_tokens :, :]
            window = (queries, inputs.given("keys"), inputs.lengths, inputs.scale)
            votes = nucleus_votes(*window, self.mass)
            score = -rank_by(votes, score).float()  # exact below 2^24
            return score, ranked_positions(score), votes > 0
        order, nobody = ranked_positions(score), torch.zeros_like(inputs.must_keep)
        longest = self._longest(usage)
        return score, order, fill_in_order(nobody, order, inputs.valid, longest)

    def _longest(self, usage: WindowUsage | None) -> torch.Tensor:
        """Return the largest nucleus of the window's rows, [E, L, H] int64 tokens."""
        nucleus = measured(usage).nucleus
        if nucleus is None:
            raise ValueError("usage: expected nuclei, got None")
        return nucleus[..., -self.needs.window_tokens :].amax(-1)

    def _scale(
        self,
        sizes: torch.Tensor,
        floors: torch.Tensor,
        caps: torch.Tensor,
        budget: int,
        num_tokens: int,
    ) -> torch.Tensor:
        """Scale the heads' sizes to a mean of `budget`, all [E, L, H] int64 tokens."""
        whole_model = self.scope == "model"
        size, floor, cap = (
            part.flatten(1) if whole_model else part.flatten(0, 1)
            for part in (sizes, floors, caps)
        )
        total = torch.full_like(size[:, 0], size.shape[-1] * budget)
        if self.dynamic:
            total = torch.minimum(total, size.sum(-1))
        most = max(size.shape[-1] * budget, num_tokens)
        return scale_to(total, size, floor, cap, most).view_as(sizes)


def scale_to(
    total: torch.Tensor,
    sizes: torch.Tensor,
    floors: torch.Tensor,
    caps: torch.Tensor,
    most: int = 2**31,
) -> torch.Tensor:
    """Scale the sizes of each group's n heads until they add up to `total`.

    What floors and caps keep a head from giving or taking falls to the others evenly.

    Args:
        total: [G] int64 tokens.
        sizes: [G, n] int64 tokens, between floors and caps.
        floors: [G, n] int64 tokens.
        caps: [G, n] int64 tokens.
        most: no total, size or cap is above it.

    Returns:
        [G, n] int64 tokens between floors and caps that add up to `total`, or to the
        nearest sum that these allow; by largest remainder.
    """
    whole = sizes.sum(-1, keepdim=True).clamp(min=1)
    share = sizes * (total[:, None] * SHARE_UNIT) // whole
    return page_quota(share, floors, caps, total, SHARE_UNIT, SHARE_UNIT * most)
