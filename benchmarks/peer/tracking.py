"""Owns what an event of a press kept: which positions, and in which order.

Called by presses, around kvpress' own code, which stays as it is. Torch only, so that
the project's environment can test it.

Axes: H KV heads, T tokens in the cache before an event, K after it, D head size.
"""

from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer.catalogue import SINKS


class Tracker:
    """The positions that each head of each layer holds, through one answer."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}
        self._next: dict[int, int] = {}
        self._masked: dict[int, Tensor] = {}
        self._sinks: dict[int, list[float]] = {}
        self._kept: list[float] = []
        self._revived: list[float] = []

    def keep(self, layer: int, total: int, indices: Tensor) -> None:
        """Note an event that drops tokens.

        Args:
            layer: index of the layer.
            total: T.
            indices: [H, K] int64, places in the cache that are kept, in their new
                order.
        """
        heads, count = indices.shape
        held = self._held.get(layer, indices.new_empty(heads, 0))
        first = self._next.get(layer, 0)
        self._next[layer] = first + total - held.shape[1]
        new = torch.arange(first, self._next[layer]).expand(heads, -1)
        held = torch.cat([held, new], dim=1).gather(1, indices)
        self._held[layer] = held
        self._note(layer, int((held < SINKS).sum()) / (SINKS * heads), count)

    def mask(self, layer: int, kept: Tensor) -> None:
        """Note an event that masks tokens and leaves all of them in the cache.

        Args:
            layer: index of the layer.
            kept: [H, T] bool.
        """
        if (before := self._masked.get(layer)) is not None:
            revived = (kept[:, : before.shape[1]] & before).sum()
            self._revived.append(int(revived) / int(kept.sum()))
        self._masked[layer] = ~kept
        sinks = kept[:, :SINKS].float().mean().item()
        self._note(layer, sinks, kept.sum().item() / len(kept))

    def _note(self, layer: int, sinks: float, count: float) -> None:
        self._sinks.setdefault(layer, []).append(sinks)
        self._kept.append(count)

    def figures(self) -> dict[str, Any]:
        """Return what the events did.

        Returns:
            `events`: of a layer; `sinks_held`: after each of them, the share of the
            first SINKS tokens that are held, mean over layers and heads; `kept_mean`:
            tokens that a head keeps, mean over events and layers, None without events;
            `revived`: share of the tokens kept whose keys an earlier event had masked,
            None where nothing is masked twice.
        """
        events = zip(*self._sinks.values(), strict=True)
        shares = [round(mean(layers), 4) for layers in events]
        return {
            "events": len(shares),
            "sinks_held": shares,
            "kept_mean": round(mean(self._kept), 2) if self._kept else None,
            "revived": round(mean(self._revived), 4) if self._revived else None,
        }


def take(states: Tensor, indices: Tensor) -> Tensor:
    """Return the states at places of the cache.

    Args:
        states: [B, H, T, D].
        indices: [B, H, K] int64.

    Returns:
        [B, H, K, D].
    """
    wide = indices.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1])
    return states.gather(2, wide).contiguous()


class Watching:
    """Mixin in front of a ScorerPress: notes what it keeps, and can sort it.

    kvpress gathers the best tokens in the order of `topk`, which is that of no cache.
    The mixin finds the same places again from the same scores and checks that they
    give what the press gave.

    Attributes:
        tracker: notes the events.
        in_order: whether tokens keep their order in the cache.
    """

    tracker: Any
    in_order: Any

    def score(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the press' own scores, [B, H, T]."""
        self._scores = super().score(*args, **kwargs)  # type: ignore[misc]
        return self._scores

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return what the press keeps of keys and values, [B, H, K, D] each.

        Raises:
            RuntimeError: the press kept something else than its best scores.
        """
        kept = super().compress(  # type: ignore[misc]
            module, hidden_states, keys, values, attentions, kwargs
        )
        if kept[0] is keys:
            return kept
        indices = self._scores.topk(kept[0].shape[2], dim=-1).indices
        if not torch.equal(take(keys, indices), kept[0]):
            raise RuntimeError("press: expected it to keep its best scores, in order")
        if self.in_order:
            indices = indices.sort(dim=-1).values
            kept = take(keys, indices), take(values, indices)
        self.tracker.keep(module.layer_idx, keys.shape[2], indices[0])
        return kept


class WatchingMask:
    """Mixin in front of AdaKVPress: notes which keys it masks.

    Attributes:
        tracker: notes the events.
    """

    tracker: Any

    def compress(
        self, module: Any, hidden_states: Tensor, keys: Tensor, *args: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values whole, [B, H, T, D] each; the press masks later."""
        whole = super().compress(module, hidden_states, keys, *args)  # type: ignore[misc]
        if self.compression_ratio:  # type: ignore[attr-defined]
            kept = torch.ones(keys.shape[1:3], dtype=torch.bool)
            _, heads, places = module.masked_key_indices
            kept[heads, places] = False
            self.tracker.mask(module.layer_idx, kept)
        return whole
