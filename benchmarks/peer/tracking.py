"""Records which positions an event of a press keeps, and in which order.

Axes: H KV heads, T tokens in the cache before an event, K after it, D head size.
"""

from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.peer.catalogue import SINKS


class Note(NamedTuple):
    """The effect of an event on a layer.

    Attributes:
        is_shorter: it dropped or masked a token.
        sinks: share of the first SINKS tokens that are held after it, mean over heads.
        kept: tokens that a head keeps, mean over heads.
        revived: share of those whose keys an earlier event had overwritten; None where
            there were no such keys.
    """

    is_shorter: bool
    sinks: float
    kept: float
    revived: float | None


class Tracker:
    """The positions that each head of each layer holds, through one answer.

    Every call of a press is recorded, even if it drops nothing, so that the records of
    all layers have the same events.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}
        self._next: dict[int, int] = {}
        self._masked: dict[int, Tensor] = {}
        self._notes: dict[int, list[Note]] = {}

    def keep(self, layer: int, total: int, indices: Tensor) -> None:
        """Record the tokens that a press kept.

        Args:
            total: T.
            indices: [H, K] int64, places in the cache that are kept, in their new
                order; all T if nothing is dropped.
        """
        heads, count = indices.shape
        held = self._held.get(layer, indices.new_empty(heads, 0))
        first = self._next.get(layer, 0)
        self._next[layer] = first + total - held.shape[1]
        new = torch.arange(first, self._next[layer]).expand(heads, -1)
        held = torch.cat([held, new], dim=1).gather(1, indices)
        self._held[layer] = held
        sinks = int((held < SINKS).sum()) / (SINKS * heads)
        self._note(layer, Note(count < total, sinks, count, None))

    def mask(self, layer: int, kept: Tensor) -> None:
        """Record the tokens that a press masked; all stay in the cache.

        A masked key is overwritten, so no later event can restore it.

        Args:
            kept: [H, T] bool; all true if nothing is masked.
        """
        gone = torch.zeros_like(kept)
        if (before := self._masked.get(layer)) is not None:
            gone[:, : before.shape[1]] = before
        self._masked[layer] = gone | ~kept
        count = int(kept.sum())
        sinks = (kept & ~gone)[:, :SINKS].float().mean().item()
        revived = int((kept & gone).sum()) / count if gone.any() else None
        self._note(layer, Note(not kept.all(), sinks, count / len(kept), revived))

    def _note(self, layer: int, note: Note) -> None:
        self._notes.setdefault(layer, []).append(note)

    def figures(self) -> dict[str, Any]:
        """Return figures over the events in which a layer lost a token.

        Returns:
            `events`: their number; `sinks_held`: after each of them, the share of the
            first SINKS tokens that are held with their own keys, mean over layers and
            heads; `kept_mean`: tokens that a head keeps, mean over events and layers,
            None without events; `revived`: share of the tokens kept whose keys an
            earlier event had overwritten, None where there were none.

        Raises:
            ValueError: layers whose presses were called at different times.
        """
        calls = zip(*self._notes.values(), strict=True)
        events = [call for call in calls if any(note.is_shorter for note in call)]
        notes = [note for event in events for note in event]
        revived = [note.revived for note in notes if note.revived is not None]
        return {
            "events": len(events),
            "sinks_held": [round(mean(n.sinks for n in event), 4) for event in events],
            "kept_mean": round(mean(n.kept for n in notes), 2) if notes else None,
            "revived": round(mean(revived), 4) if revived else None,
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
    """Mixin for a ScorerPress: records what it keeps, and can sort it.

    kvpress stores the best tokens in the order of `topk`, not in cache order. The mixin
    computes the same places from the same scores and checks that they give the press'
    result.

    Attributes:
        in_order: tokens keep their order in the cache.
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
            RuntimeError: the press did not keep its best scores.
        """
        kept = super().compress(  # type: ignore[misc]
            module, hidden_states, keys, values, attentions, kwargs
        )
        heads, total = keys.shape[1:3]
        if kept[0] is keys:
            everything = torch.arange(total).expand(heads, -1)
            self.tracker.keep(module.layer_idx, total, everything)
            return kept
        indices = self._scores.topk(kept[0].shape[2], dim=-1).indices
        if not torch.equal(take(keys, indices), kept[0]):
            raise RuntimeError("press: expected it to keep its best scores, in order")
        if self.in_order:
            indices = indices.sort(dim=-1).values
            kept = take(keys, indices), take(values, indices)
        self.tracker.keep(module.layer_idx, total, indices[0])
        return kept


class WatchingMask:
    """Mixin for AdaKVPress: records which keys it masks."""

    tracker: Any

    def compress(
        self, module: Any, hidden_states: Tensor, keys: Tensor, *args: Any
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values, [B, H, T, D] each; the press masks later."""
        whole = super().compress(module, hidden_states, keys, *args)  # type: ignore[misc]
        kept = torch.ones(keys.shape[1:3], dtype=torch.bool)
        if self.compression_ratio:  # type: ignore[attr-defined]
            _, heads, places = module.masked_key_indices
            kept[heads, places] = False
        self.tracker.mask(module.layer_idx, kept)
        return whole
