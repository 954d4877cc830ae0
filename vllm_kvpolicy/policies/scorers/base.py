"""The base class of scorers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.ranks import HeadShard


class BaseScorer(ABC):
    """Says how important each token is; knows nothing about budgets.

    Subclasses set `needs` and define `score`.
    """

    needs = Needs()

    def check_model(  # noqa: B027  most have nothing to check
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check at start-up that the scorer can serve the model.

        Args:
            num_layers: L, attention layers.
            num_heads: Hq, query heads per layer, of all ranks.
            num_kv_heads: H, KV heads per layer, of all ranks.
            head_dim: D, channels per head.

        Raises:
            ValueError: it was calibrated for a model of another shape.
        """

    def take_heads(self, shard: HeadShard) -> None:  # noqa: B027  likewise
        """Score some of the model's heads; once, after `check_model`."""

    @abstractmethod
    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> torch.Tensor:
        """Score every token.

        Args:
            inputs: the event.
            usage: attention of the window, None unless `needs` asks for it.

        Returns:
            [E, L, H, T] float32, higher is kept sooner; NaN counts as minus infinity;
            unspecified on padding. May be a broadcast view.
        """

    def remember(self, score: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return what `needs.memory` names, [E, L, H, T] float32 each.

        Args:
            score: as `score` just returned it.
        """
        return {}
