"""Measures what a trained model keeps and how far it is from the teacher."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm_kvpolicy.train.dms.attention import SHIFT, noise_of
from vllm_kvpolicy.train.dms.losses import distillation
from vllm_kvpolicy.train.dms.retrofit import Retrofit
from vllm_kvpolicy.train.rows import Row

VALIDATION = -1  # replaces the step in the seed of noise


@dataclass(frozen=True)
class Figures:
    """Means over validation rows; losses over the tokens that count in `distillation`.

    Args:
        kept_fraction: share of the decided tokens that are kept, mean over layers and
            heads.
        kept_by_head: the same, [L][H].
        cached_fraction: share of tokens in the cache after a row: those kept, and the
            window.
        compression_ratio: tokens per token in the cache, 1 / cached_fraction.
        soft_loss: divergence KL(student || teacher) with noisy, soft decisions, as
            trained; nats per token.
        hard_loss: the same with tokens kept or dropped, as served.
        window_loss: the same if every token is dropped that leaves the window.
        tokens: number of tokens measured.
    """

    kept_fraction: float
    kept_by_head: list[list[float]]
    cached_fraction: float
    compression_ratio: float
    soft_loss: float
    hard_loss: float
    window_loss: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@torch.no_grad()
def measure(retrofit: Retrofit, rows: Sequence[Row]) -> Figures:
    """Measure a model on validation rows, at least one."""
    base, settings = retrofit.teacher, retrofit.settings
    kept = torch.zeros(base.num_layers, base.num_kv_heads, device=base.device)
    losses = torch.zeros(3)
    cached, tokens, counted, decided = 0.0, 0, 0, 0
    for index, row in enumerate(rows):
        wanted = base.hidden(row.ids)
        noise = noise_of(base, len(row), settings.seed, VALIDATION, index)
        served = retrofit.dropping()
        ways = (
            retrofit.dropping(noise=noise),
            served,
            retrofit.dropping(least=-torch.inf),
        )
        for way, student in enumerate(ways):
            got = retrofit.student.hidden(row.ids, student)
            total, number = distillation(retrofit.student, got, base, wanted, row)
            losses[way] += total.cpu()
        keep = served.keep()[:, 0]
        kept += keep[..., :-SHIFT].sum(-1)
        keep[..., max(0, len(row) - settings.window - 1) :] = True
        cached += keep.float().mean().item() * len(row)
        tokens, decided = tokens + len(row), decided + len(row) - SHIFT
        counted += number
    soft, hard, window = (losses / max(counted, 1)).tolist()
    return Figures(
        kept_fraction=kept.mean().item() / decided,
        kept_by_head=(kept / decided).tolist(),
        cached_fraction=cached / tokens,
        compression_ratio=tokens / cached,
        soft_loss=soft,
        hard_loss=hard,
        window_loss=window,
        tokens=tokens,
    )
