"""Hashes integers, for choices that look random but follow from their inputs alone.

Source: https://nullprogram.com/blog/2018/07/31/ (lowbias32).
"""

import torch


def mix(values: torch.Tensor) -> torch.Tensor:
    """Hash int64 to 0..2^32-1: xor-shift and multiply, a bijection on 32-bit values."""
    mask = 2**32 - 1
    values = (values ^ (values >> 32)) & mask
    values = ((values ^ (values >> 16)) * 0x7FEB352D) & mask
    values = ((values ^ (values >> 15)) * 0x846CA68B) & mask
    return values ^ (values >> 16)
