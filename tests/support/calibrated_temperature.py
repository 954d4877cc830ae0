"""Hard-KV's Problem 1: tau so that the K largest of softmax(f / tau) hold mass p.

f is a method's logits, K the size of the nucleus of raw attention at mass p. With tau
solved per row the nucleus of the calibrated softmax has K tokens again, and it is the
first K by f: `hard` takes the count from raw attention and the order from f, and
needs no tau.

Source: Hard-KV, Problem 1, Constraint 1 and algorithm 2;
https://github.com/SuDIS-ZJU/HARDInfer. Deviations: the largest K of the row, not the
first in the cache; the mass that the K largest raw weights really hold, p or a little
more; bisection over logarithms, a fixed number of steps, up to a tau of 1000 (theirs
ends at 1, too low where f is flatter than the raw logits).
"""

import math

import torch

from vllm_kvpolicy.kernels.nucleus import nucleus_mask
from vllm_kvpolicy.kernels.ranking import ranked_positions

LOWEST, HIGHEST, STEPS = 1e-3, 1e3, 60


def calibrate(
    logits: torch.Tensor, raw: torch.Tensor, mass: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve each row for its temperature.

    Args:
        logits: [R, T] floating point, f; minus infinity on hidden tokens.
        raw: [R, T] floating point, raw attention logits, hidden likewise.
        mass: p, above 0, at most 1.

    Returns:
        tau [R] float64, within 0.001 to 1000; K [R] int64, tokens; and [R] float64,
        the mass of the K largest raw weights, which softmax(f / tau) gives its own.
    """
    count = nucleus_mask(raw, mass).sum(-1)
    target = top_mass(raw, count)
    low = torch.full_like(target, math.log(LOWEST))
    high = torch.full_like(target, math.log(HIGHEST))
    for _ in range(STEPS):
        middle = (low + high) / 2
        # A higher temperature flattens the row: its K largest hold less.
        is_sharp = top_mass(logits / middle.exp()[:, None], count) > target
        low = torch.where(is_sharp, middle, low)
        high = torch.where(is_sharp, high, middle)
    return low.exp(), count, target


def top_mass(logits: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the mass of the largest `count` [R] of softmax(logits [R, T]), float64."""
    probs = torch.softmax(logits.double(), dim=-1)
    probs = probs.gather(-1, ranked_positions(logits))
    rank = torch.arange(probs.shape[-1], device=probs.device)
    return probs.masked_fill(rank >= count[:, None], 0.0).sum(-1)
