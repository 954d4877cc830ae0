"""The losses of DMS: divergence from the teacher, and too few tokens dropped.

Source: DMS (arXiv 2506.05345) section 3; https://github.com/NVIDIA/Model-Optimizer/
tree/a2fbac7b/experimental/dms, where tokens of prompts count as well. Deviations:
computed in blocks of tokens instead of blocks of the vocabulary; a row may say that
only answers count.
"""

import torch
from torch.utils.checkpoint import checkpoint

from vllm_kvpolicy.train.base import Base
from vllm_kvpolicy.train.rows import Row

BLOCK = 512  # tokens whose logits are in memory at once


def distillation(
    student: Base,
    student_hidden: torch.Tensor,
    teacher: Base,
    teacher_hidden: torch.Tensor,
    row: Row,
) -> tuple[torch.Tensor, int]:
    """Sum the divergences KL(student || teacher) of next tokens.

    Args:
        student: its output embedding turns `student_hidden` into logits.
        student_hidden: [1, T, d], see `Base.hidden`.
        teacher: like `student`.
        teacher_hidden: like `student_hidden`.
        row: tokens that follow the end of a text do not count either.

    Returns:
        The sum, float32, and over how many tokens it is.
    """
    ends = torch.tensor(teacher.ends, dtype=row.ids.dtype)
    counts = ~torch.isin(row.ids, ends)
    if row.counts is not None:
        counts &= row.counts
    number = int(counts.sum())
    counts = counts.to(teacher.device)
    total = torch.zeros((), device=teacher.device)
    for start in range(0, len(row), BLOCK):
        part = slice(start, start + BLOCK)
        # The backward pass recomputes logits instead of keeping them.
        total = total + checkpoint(
            _divergence,
            student,
            student_hidden[0, part],
            teacher,
            teacher_hidden[0, part],
            counts[part],
            use_reentrant=False,
        )
    return total, number


def _divergence(
    student: Base,
    student_hidden: torch.Tensor,
    teacher: Base,
    teacher_hidden: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of the divergences of the tokens that count."""
    own = student.logits(student_hidden).log_softmax(-1)
    wanted = teacher.logits(teacher_hidden).log_softmax(-1)
    divergences = (own.exp() * (own - wanted)).sum(-1)
    return divergences.masked_fill(~counts, 0.0).sum()


def compression(alphas: torch.Tensor, wanted: float) -> torch.Tensor:
    """Return how far the mean decision is below `wanted`, 0 if it is above."""
    return (wanted - alphas.mean()).clamp(min=0)
