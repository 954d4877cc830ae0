"""The contract between the worker and a policy: what an event sees and what it decides.

Axes of policies: E events (one request each), L layers, H KV heads, G query heads per
KV head (Hq = H * G), T tokens held (right-padded, per head), D head size, W window
queries, K budget in tokens per KV head, M places of survivors, R = E * L * H rows.
Tokens are in time order, oldest first. Heads may hold different tokens, and under a
ragged policy different numbers of them; the local tokens are the newest of every head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.policies.ranks import ONE_RANK, HeadShard, Ranks
from vllm_kvpolicy.policies.scorers._signals import TokenSignal


@dataclass(frozen=True)
class Needs:
    """What a policy reads at an event, in addition to lengths and the must-keep set.

    Args:
        window_tokens: W, newest queries; 0 for none.
        usage: the window's attention to the keys, measured once for scorer and
            allocator, over the larger window of those that read it. A scorer with a
            window of its own asks for queries instead and slices them itself.
        mass: of the nuclei, measured along with the usage; 0 for none.
        keys: cached post-RoPE keys.
        values: cached values.
        positions: true positions of the held tokens.
        rope: how the model rotates.
        halves: it reads channels i and i + D/2 as the pairs that rotate.
        alike: it reads one rotation for all layers.
        signals: what is measured at every token while it is computed.
        memory: names of the float32 values that it keeps per survivor from event to
            event.
        until: the decisions made while tokens were computed, see `BaseAdmission`.
        exact: attention follows these decisions, not only events.
    """

    window_tokens: int = 0
    usage: bool = False
    mass: float = 0.0
    keys: bool = False
    values: bool = False
    positions: bool = False
    rope: bool = False
    halves: bool = False
    alike: bool = False
    signals: tuple[TokenSignal, ...] = ()
    memory: tuple[str, ...] = ()
    until: bool = False
    exact: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        """Return what is needed by either."""
        merged: dict[str, Any] = {}
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            is_list = isinstance(mine, tuple)
            merged[name] = (
                tuple(dict.fromkeys(mine + theirs)) if is_list else max(mine, theirs)
            )
        return Needs(**merged)


@dataclass(frozen=True)
class EventInputs:
    """Everything a policy may read at an event.

    Args:
        lengths: [E, L, H] int64, tokens held before the event.
        must_keep: [E, L, H, T] bool, sinks and local tokens; False on padding. A
            leading run of True counts as sinks if a policy has to tell them from
            recent tokens.
        end: [E] int64, tokens computed before the event: the newest held token has
            position `end - 1`.
        scale: softmax scale of the model's attention.
        keys: [E, L, H, T, D] model dtype, cached post-RoPE keys, plain or on pages, or
            None unless `Needs` asks for them, like all fields below whose type allows
            None. Values on padding are unspecified. Of an FP8 cache they are what
            attention reads, rounded when they were stored, unlike `queries`. Read
            through `given` or `paged`.
        values: [E, L, H, T, D] model dtype, cached values; likewise.
        queries: [E, L, Hq, W, D] model dtype, the newest W post-RoPE queries, each at
            its own position, newest last.
        positions: [E, L, H, T] int64, true positions.
        rope: how the model's layers rotate.
        signals: by signal, [E, P] float32 by position, also of tokens dropped since;
            P is at least the largest `end`, entries from a request's own `end` on are
            unspecified.
        prompt_lengths: [E] int64, tokens of the prompt; the worker always sets it.
        memory: by name, [E, L, H, T] float32: what the policy returned at the
            request's last event, gathered along with the survivors; zero for newer
            tokens and everywhere at a first event.
        fresh_tokens: tokens computed since the request's last event, of the event with
            the most.
        until: [E, L, H, T] int32, first query that no longer sees each token;
            `kernels.visibility.NEVER` where it is kept.
        candidates: [E, L, H, T] bool, tokens that an eviction may choose, must-keep
            tokens among them; None for all. Fewer than the budget may be left of a row,
            which others then fill up to whole pages.
        ranks: for what depends on heads that other ranks have.
        sink_logits: [L, Hq] float32, of learned sinks, which take part in every
            softmax of the model; None where it has none.
    """

    lengths: Tensor
    must_keep: Tensor
    end: Tensor
    scale: float
    keys: Tensor | PagedTokens | None = None
    values: Tensor | PagedTokens | None = None
    queries: Tensor | None = None
    positions: Tensor | None = None
    rope: Rope | None = None
    signals: Mapping[TokenSignal, Tensor] | None = None
    prompt_lengths: Tensor | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    fresh_tokens: int = 0
    until: Tensor | None = None
    candidates: Tensor | None = None
    ranks: Ranks = ONE_RANK
    sink_logits: Tensor | None = None

    @cached_property
    def valid(self) -> Tensor:
        """[E, L, H, T] bool, False on padding."""
        token = torch.arange(self.must_keep.shape[-1], device=self.must_keep.device)
        return token < self.lengths[..., None]

    def given(self, name: str) -> Any:
        """Return a field, keys and values as one tensor; ValueError if not given."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{name}: got None, but this policy needs it")
        return value.dense if isinstance(value, PagedTokens) else value

    def paged(self, name: str) -> PagedTokens:
        """Return keys or values on pages, without a copy; raises as `given`."""
        value = getattr(self, name)
        if isinstance(value, PagedTokens):
            return value
        return PagedTokens.from_dense(self.given(name))

    def copied(self) -> "EventInputs":
        """Copy the keys and values, so that they survive the moving of tokens."""
        names = [name for name in ("keys", "values") if getattr(self, name) is not None]
        return replace(self, **{name: self.given(name) for name in names})


@dataclass(frozen=True)
class Merge:
    """Dropped tokens that are merged into survivors of their head.

    Args:
        partner: [E, L, H, T] int64, the token of the same head that each survivor
            takes in, no token twice; -1 for none. Neither is a must-keep token.
        weight: [E, L, H, T] float32, a survivor's share of its merged key and value, 0
            to 1; the rest is its partner's.
    """

    partner: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Decision:
    """What a policy decided, per (event, layer, KV head).

    Args:
        keep: [E, L, H, T] bool, must-keep tokens included, padding excluded. Exactly
            `budget` True per row; under a ragged policy `budget` per row on average
            over the layers and heads of each event, or all that is held where that is
            less; under a dynamic one, or with `candidates`, no more than that. The
            policies that only move tokens (`identity`, `holes`) keep every valid token
            instead.
        score: [E, L, H, T] float32, higher is kept sooner; ranks the tokens that fill
            up a partly used page. Unspecified on padding.
        memory: by name, [E, L, H, T] float32 before the survivors are gathered.
        notes: by name, [E, L, H, ...], what led to the decision; only traces read it.
        merge: what survivors take in, None for nothing; needs keys and values.
    """

    keep: Tensor
    score: Tensor
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Mapping[str, Tensor] = field(default_factory=dict)
    merge: Merge | None = None


class OfModel:
    """What serves one model: a policy, or a part of one, which has parts of its own."""

    consists_of: tuple["OfModel", ...] = ()

    def check_model(self, model: ModelShape) -> None:
        """Raise ValueError if it was made for a model of another shape."""
        for part in self.consists_of:
            part.check_model(model)

    def take_heads(self, shard: HeadShard) -> None:
        """Serve some of the model's heads; once, after `check_model`."""
        for part in self.consists_of:
            part.take_heads(shard)


class Policy(OfModel, ABC):
    """Scores, allocates and selects in one call; subclasses define `decide`.

    Attributes:
        needs: what `decide` reads.
        dynamic: it may choose less than the budget.
    """

    needs = Needs()
    dynamic = False
    # Puts survivors in another order, to test their moving: `testing.MovementPolicy`.
    shuffled: Callable[..., tuple[Tensor, Tensor]] | None = None

    @abstractmethod
    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Choose `budget` tokens per row; pure, no host sync, no state."""


@dataclass(frozen=True)
class LoadedModel:
    """A model to hook: its weights are there, it is not yet compiled or captured.

    Args:
        layers: its attention layers in model order.
        rope: None unless a policy asks for it.
    """

    module: nn.Module
    layers: Sequence[Any]
    vllm_config: Any
    device: torch.device
    rope: Rope | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.vllm_config.model_config.dtype

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step, padding included."""
        return self.vllm_config.scheduler_config.max_num_batched_tokens
