"""Measures what a student keeps and how far it is from its teacher."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from training.model import Base, Student
from training.rows import Row

Passes = Callable[[int, Row], Sequence[Student]]
"""Returns the students of a row, given its place and itself.

They see keys as trained, as served, and of the window alone.
"""
RowLoss = Callable[[Row, Student, torch.Tensor], tuple[torch.Tensor, int]]
"""Runs a student on a row, given the teacher's hidden states.

Returns the sum of its losses, and over how many tokens it is.
"""


@dataclass(frozen=True)
class Figures:
    """Means over validation rows; losses over the tokens that count.

    Args:
        kept_fraction: share of the decided tokens that are kept, mean over layers and
            heads.
        kept_by_head: the same, [L][H].
        cached_fraction: share of tokens in the cache after a row: those kept, and the
            window.
        compression_ratio: tokens per token in the cache, 1 / cached_fraction.
        soft_loss: distillation loss with soft decisions, as trained.
        hard_loss: the same with tokens kept or dropped, as served.
        window_loss: the same if every token is dropped that leaves the window.
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

    def losses_in_words(self) -> str:
        """Return the losses as part of a sentence."""
        return (
            f"loss {self.soft_loss:.4g} as trained, {self.hard_loss:.4g} as served, "
            f"{self.window_loss:.4g} with the window alone"
        )


@torch.no_grad()
def figures_of(
    teacher: Base,
    rows: Sequence[Row],
    passes: Passes,
    loss: RowLoss,
    window: int,
    shift: int = 0,
) -> Figures:
    """Measure students on validation rows.

    Args:
        rows: at least one.
        passes: the students of a row.
        loss: of one student and row.
        window: tokens that every query sees, itself included.
        shift: last tokens of a row, about which nothing is decided.
    """
    size, device = (teacher.num_layers, teacher.num_kv_heads), teacher.device
    kept, losses = torch.zeros(size, device=device), torch.zeros(3)
    cached, tokens, counted, decided = 0.0, 0, 0, 0
    for index, row in enumerate(rows):
        wanted = teacher.hidden(row.ids)
        students = passes(index, row)
        for way, student in enumerate(students):
            total, number = loss(row, student, wanted)
            losses[way] += total.cpu()
        keep = students[1].keep()[:, 0]
        kept += keep[..., : len(row) - shift].sum(-1)
        keep[..., max(0, len(row) - window) :] = True
        cached += keep.float().mean().item() * len(row)
        tokens, decided = tokens + len(row), decided + len(row) - shift
        counted += number
    soft, hard, alone = (losses / max(counted, 1)).tolist()
    return Figures(
        kept_fraction=kept.mean().item() / decided,
        kept_by_head=(kept / decided).tolist(),
        cached_fraction=cached / tokens,
        compression_ratio=tokens / cached,
        soft_loss=soft,
        hard_loss=hard,
        window_loss=alone,
        tokens=tokens,
    )
