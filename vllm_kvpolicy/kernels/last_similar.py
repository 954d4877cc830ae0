"""Finds, for each key of a row, the last other key of almost the same direction.

Source: R-KV (arXiv 2505.24133) section 3.3 and `cal_similarity` in
https://github.com/Zefan-Cai/R-KV/blob/d15c9767/rkv/utils.py, direction "last".
Deviations: a tile of similarities at a time (theirs stores all of them).
"""

import torch
from torch import Tensor

# Bound on the similarities in flight.
TILE_BYTES = 64 * 2**20


def last_similar(unit: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Find the last key whose cosine with key i is above the threshold, i left out.

    Args:
        unit: [R, T, D] float32, keys of length 1; zero on padding.
        threshold: cosine, at least 0.

    Returns:
        [R, T] int64, index of that key, 0 for a key without any; and [R, T] float32,
        the cosine with the key of that index, 0 where it is the key itself.
    """
    num_rows, num_tokens, _ = unit.shape
    position = torch.arange(num_tokens, dtype=torch.int32, device=unit.device)
    last = torch.empty(unit.shape[:2], dtype=torch.int64, device=unit.device)
    cosine = torch.empty_like(unit[..., 0])
    step = max(1, TILE_BYTES // (4 * num_rows * num_tokens))
    for start in range(0, num_tokens, step):
        tile = slice(start, start + step)
        similar = unit[:, tile] @ unit.transpose(-1, -2)
        similar.masked_fill_(position[tile, None] == position, 0.0)
        found = torch.where(similar > threshold, position, 0).amax(-1, keepdim=True)
        last[:, tile] = found.squeeze(-1)
        cosine[:, tile] = similar.gather(-1, found.long()).squeeze(-1)
    return last, cosine
