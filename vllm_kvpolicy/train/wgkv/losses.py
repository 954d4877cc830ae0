"""The losses of WG-KV's gates: distance from the teacher, and tokens kept.

Source: WG-KV (arXiv 2512.17452) section 3.4; the weight of positions, which the paper
omits, is that of https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/src.
Deviations: sinks, which are always kept, cost nothing; the distance may be that of
answers only, where the authors' has all tokens.
"""

import torch


def distillation(
    student: torch.Tensor, teacher: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean squared difference of hidden states, float32.

    Args:
        student: [B, T, d] floating point.
        teacher: like `student`.
        counts: [T] bool, tokens that count; None for all, as the authors have it.
    """
    if counts is not None:
        counts = counts.to(student.device)
        student, teacher = student[:, counts], teacher[:, counts]
    return torch.nn.functional.mse_loss(student.float(), teacher.float())


def position_weights(num_tokens: int, window: int, sinks: int = 0) -> torch.Tensor:
    """Return the share of later queries for which a token's gate matters.

    With 4 tokens and a window of 2 the weights are [0.5, 1/3, 0, 0].

    Args:
        num_tokens: T, length of the sequence.
        window: tokens that every query sees.
        sinks: first tokens, whose gates are ignored.

    Returns:
        [T] float32: w_j = 1 - min(1, window / (T - j)), 0 for sinks.
    """
    remaining = torch.arange(num_tokens, 0, -1, dtype=torch.float32)
    weights = 1 - (window / remaining).clamp(max=1)
    weights[:sinks] = 0
    return weights


def sparsity(gates: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean of 1 - w + w (g + g (1 - g)); it is 1 if all gates are 1.

    Args:
        gates: [..., T] floating point, g.
        weights: [T], see `position_weights`.
    """
    weights = weights.to(gates.device)
    return (1 - weights + weights * gates * (2 - gates)).mean()
