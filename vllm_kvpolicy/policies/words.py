"""The base classes of a policy's words: scorers, allocators, admissions, selections.

A word is one class with all that there is to know about it: the method, its options,
where it is published, and, as class attributes, what the rest of the package asks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import (
    Decision,
    EventInputs,
    LoadedModel,
    Needs,
    OfModel,
)
from vllm_kvpolicy.policies.options import BaseOptions


class Word(OfModel):
    """One word of the grammar.

    Each file in the folder of a kind defines one: its only class that sets `summary`.

    Attributes:
        Options: the keys of `--kv-policy-config` that it reads; it is built with an
            instance.
        options: that instance.
        needs: what it reads at an event, beside the queries of `query_window`.
        summary: half a line for help texts.
        source: where the method is published.
        query_window: queries that it reads: a number, or the option that holds it.
        ragged: heads end up with different numbers of tokens, as after any admission.
        dynamic: it may keep less than the budget; an admission always may.
        pins_prompt: prompt tokens are pinned unless the user says otherwise.
        decides: it always decides while tokens are computed, not at events.
        decides_later: whether a token is kept is decided by the token after it.
        measures_tokens: its events read what was measured when each token was computed,
            so that a request takes nothing from the prefix cache.
        weighs_itself: it computes attention of its own from queries, which leaves out
            learned sinks.
        rotates: it reads how the model rotates queries and keys.
        reads_heads: it reads keys or values of a KV head as vectors, or sizes heads
            one by one; false where the logits of queries, or nothing, are enough, so
            that it serves layers whose heads share one vector per token (MLA).
        fitted: it belongs to one model's weights: by a file, or by their training.
        presets: option values by the name of a preset.
        refuses: words that it is not combined with, and why.
        placement: chooses the superblocks of survivors, see `testing.shuffled`; None
            for the request's oldest, so that survivors move towards the front.
    """

    Options: ClassVar[type[BaseOptions]] = BaseOptions
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    query_window: ClassVar[int | str] = 0
    ragged: ClassVar[bool] = False
    dynamic: bool = False
    pins_prompt: ClassVar[bool] = False
    decides: ClassVar[bool] = False
    decides_later: ClassVar[bool] = False
    measures_tokens: ClassVar[bool] = False
    weighs_itself: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    reads_heads: ClassVar[bool] = True
    fitted: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    refuses: ClassVar[Mapping[str, str]] = {}
    placement: ClassVar[Callable[..., list[Any]] | None] = None
    needs = Needs()
    options: Any

    def __init__(self, options: BaseOptions) -> None:
        self.options = options
        window = self.window_tokens(dict(options))
        self.needs = self.needs | Needs(window_tokens=window)

    @classmethod
    def build(cls, options: Any) -> Any:
        """Build it from its options; ValueError if a file cannot be read or used."""
        return cls(options)

    @classmethod
    def check_start(cls, options: Any, kept: Any, vllm_config: Any) -> None:
        """Check, before an engine starts, that it can serve a model under its settings.

        Args:
            options: an instance of `Options`.
            kept: the tokens that the server always keeps, `sink_tokens` first and
                `recent_tokens` newest ones.
            vllm_config: the finished VllmConfig.

        Raises:
            ValueError: one sentence with what was found and what to change.
        """

    @classmethod
    def window_tokens(cls, values: Mapping[str, Any]) -> int:
        """Return how many queries it reads with these options, among those of others.

        A missing key takes its default.
        """
        if isinstance(cls.query_window, int):
            return cls.query_window
        default = cls.Options.model_fields[cls.query_window].default
        return values.get(cls.query_window, default)


class BaseScorer(Word, ABC):
    """Says how important each token is; knows nothing about budgets."""

    @abstractmethod
    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score every token.

        Args:
            usage: attention of the window, None unless `needs` asks for it.

        Returns:
            [E, L, H, T] float32, higher is kept sooner; NaN counts as minus infinity;
            unspecified on padding. May be a broadcast view.
        """

    def remember(self, score: Tensor) -> Mapping[str, Tensor]:
        """Return what `needs.memory` names, [E, L, H, T] float32, of the last score."""
        return {}


class BaseAllocator(Word, ABC):
    """Shares the budget among layers, heads and regions, given scores."""

    @abstractmethod
    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        """Pick `budget` tokens per row, must-keep first.

        Args:
            score: [E, L, H, T] float32, what the scorer returned.
            usage: attention of the window, None unless scorer or allocator needs it.
            budget: K, tokens per row.
        """


class BaseAdmission(Word):
    """Predicts how useful a token will be when it is no longer among the newest.

    A subclass defines `gates`; or it sets `needs.until`, defines the other methods, and
    decides while tokens are computed: its decisions then act as gates of 0 or 1.

    Attributes:
        threshold: tokens with a gate above this are admitted.
        window: queries that always see a token, its own included.
        shift: the token at t decides on the one at t - shift, 0 or 1.
    """

    ragged = True
    threshold: float = 0.5
    window = 1
    shift = 0

    def gates(self, inputs: EventInputs, token: Tensor) -> Tensor:
        """Evaluate the gates of some tokens.

        Args:
            inputs: the event.
            token: [E, L, H, F] int64, held tokens, by their places in the rows.

        Returns:
            [E, L, H, F] float32 between 0 and 1.
        """
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, once it is attached."""
        raise NotImplementedError

    def attach(self, model: LoadedModel) -> None:
        """Hook the loaded model.

        Raises:
            ValueError: the model is not one that it can hook.
        """
        raise NotImplementedError

    def decisions(self, layer: int, key: Tensor, positions: Tensor) -> Decisions:
        """Decide on the new tokens of a layer.

        Args:
            key: [T, H, D] model dtype, post-RoPE.
            positions: [T] int64.

        Returns:
            [T, H], keep or drop the token at t - shift.
        """
        raise NotImplementedError


# Why admissions with a gate refuse the allocators that size heads or chunks.
_HELD = (
    "the allocator sizes heads by the tokens held, not by the tokens admitted; `trim` "
    "sizes them by the latter"
)
SIZED_BY_HELD = {
    "adakv": _HELD,
    "pyramid": _HELD,
    "hard": _HELD,
    "strat": _HELD,
    "chunk": "a chunk that contains a token refused by the admission has no score",
}
# Why allocators refuse `streaming`.
RECENCY = "recency does not measure importance within a region or a head"
