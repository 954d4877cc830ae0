"""The contract between the worker and a policy: what an event sees and what it decides.

Called by attention.compaction, once per group of events that share a budget.
Process: worker

Axes used everywhere: E events (one request each), L layers, H KV heads, G query heads
per KV head (Hq = H * G), T tokens held (right-padded), D head size, W window queries,
K budget in tokens per KV head, C survivors to place, R = E * L * H rows.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_kvpolicy.kernels.window_usage import WindowUsage


@dataclass(frozen=True)
class EventInputs:
    """Everything a policy may read at an event. Tokens are in time order, oldest first.

    Args:
        lengths: [E] int64, tokens held before the event, per request.
        must_keep: [E, T] bool, sinks and local tokens; False on padding. A leading run
            of True counts as sinks if a policy has to tell them from recent tokens.
        keys: [E, L, H, T, D] model dtype, cached post-RoPE keys; None unless the
            policy declares `needs_keys`. Values on padding are unspecified.
        queries: [E, L, Hq, W, D] model dtype, the newest W post-RoPE queries, each at
            its own position, newest last; None where `window_tokens` is 0.
        credit: [E, L, H, T] float32, what the policy returned at the request's last
            event, gathered along with the survivors and zero for newer tokens; zero
            everywhere at a request's first event; None unless the policy declares
            `has_credit`.
        scale: softmax scale of the model's attention.
        num_layers: L; policies that read neither keys nor queries need it.
        num_kv_heads: H, on this rank.
    """

    lengths: torch.Tensor
    must_keep: torch.Tensor
    keys: torch.Tensor | None
    queries: torch.Tensor | None
    credit: torch.Tensor | None
    scale: float
    num_layers: int
    num_kv_heads: int


@dataclass(frozen=True)
class Decision:
    """What a policy decided, per (event, layer, KV head).

    Args:
        keep: [E, L, H, T] bool, exactly `budget` True per row, must-keep tokens
            included, padding excluded. The policies that only move tokens (`identity`,
            `holes`) keep every valid token instead.
        score: [E, L, H, T] float32, higher is kept sooner; ranks the tokens that fill
            up a partly used page. Unspecified on padding.
        credit: [E, L, H, T] float32, before the survivors are gathered, or None.
    """

    keep: torch.Tensor
    score: torch.Tensor
    credit: torch.Tensor | None = None


class Policy(Protocol):
    """A policy for heads of equal length: score, allocate and select in one call."""

    window_tokens: int
    needs_keys: bool
    has_credit: bool

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Choose `budget` tokens per row; pure, no host sync, no state."""
        ...

    def arrange(self, sources: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        """Choose which survivor goes to which destination slot.

        Args:
            sources: [E, L, H, C] int64, survivors' token indices, ascending; negative
                entries are padding on the right.
            seeds: [E] int64, one per event, a pure function of the request.

        Returns:
            [E, L, H, C] int64, `sources` itself for every policy but those that test
            the moving of tokens.
        """
        ...


class Scorer(Protocol):
    """Says how important each token is; knows nothing about budgets."""

    window_tokens: int
    needs_keys: bool

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> torch.Tensor:
        """Score every token.

        Args:
            inputs: the event.
            usage: attention of the window, None if nobody asked for queries.

        Returns:
            [E, L, H, T] float32, higher is kept sooner; NaN counts as minus infinity;
            unspecified on padding. May be a broadcast view.
        """
        ...


class Allocator(Protocol):
    """Says how the budget is spent over a head's tokens, given their scores."""

    window_tokens: int
    needs_keys: bool
    has_credit: bool

    def choose(
        self,
        score: torch.Tensor,
        inputs: EventInputs,
        usage: WindowUsage | None,
        budget: int,
    ) -> Decision:
        """Pick `budget` tokens per row of `score` [E, L, H, T], must-keep first."""
        ...
