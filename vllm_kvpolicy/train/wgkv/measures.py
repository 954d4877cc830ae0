"""Measures what trained gates keep and how far outputs are from the teacher's."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm_kvpolicy.kernels.wgkv_gate import GateWeights
from vllm_kvpolicy.train.base import Base
from vllm_kvpolicy.train.rows import Row
from vllm_kvpolicy.train.wgkv.attention import Gating
from vllm_kvpolicy.train.wgkv.losses import distillation


@dataclass(frozen=True)
class Figures:
    """Means over validation rows.

    Args:
        kept_fraction: share of tokens that are sinks or have a gate above the
            threshold, mean over layers and heads.
        kept_by_head: the same, [L][H].
        cached_fraction: share of tokens in the cache after a row: those kept, and the
            window.
        soft_loss: distillation loss with keys weighted by their gates, as trained.
        hard_loss: the same with tokens kept or dropped, as served.
        window_loss: the same if every token is dropped that leaves the window.
        tokens: number of tokens measured.
    """

    kept_fraction: float
    kept_by_head: list[list[float]]
    cached_fraction: float
    soft_loss: float
    hard_loss: float
    window_loss: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@torch.no_grad()
def measure(
    base: Base,
    rows: Sequence[Row],
    weights: GateWeights,
    window: int,
    sinks: int,
    threshold: float,
) -> Figures:
    """Measure gates on validation rows.

    Args:
        base: the frozen model.
        rows: at least one.
        weights: the gates.
        window: tokens that every query sees, itself included.
        sinks: first tokens, always kept.
        threshold: tokens with a gate above this are kept.
    """
    kept = torch.zeros(base.num_layers, base.num_kv_heads, device=base.device)
    cached, tokens, counted = 0.0, 0, 0
    losses = torch.zeros(3)
    for row in rows:
        teacher = base.hidden(row.ids)
        for index, level in enumerate((None, threshold, torch.inf)):
            gating = Gating(weights, base.rope, window, sinks, level)
            loss = distillation(base.hidden(row.ids, gating), teacher, row.counts)
            losses[index] += loss.cpu() * row.weight
            if level == threshold:
                gates = torch.cat([gating.values[i] for i in range(base.num_layers)])
        keep = gates > threshold
        keep[..., :sinks] = True
        kept += keep.sum(-1)
        keep[..., max(0, len(row) - window) :] = True
        cached += keep.float().mean().item() * len(row)
        tokens, counted = tokens + len(row), counted + row.weight
    soft, hard, window_only = (losses / counted).tolist()
    return Figures(
        kept_fraction=kept.mean().item() / tokens,
        kept_by_head=(kept / tokens).tolist(),
        cached_fraction=cached / tokens,
        soft_loss=soft,
        hard_loss=hard,
        window_loss=window_only,
        tokens=tokens,
    )
