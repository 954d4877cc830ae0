"""The parts of EpiKV's variants that read the cache at an event."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.ranking import ranks_within

LAG_EPS = 1e-9  # added to the range of a chunk


def best_of_segments(
    score: torch.Tensor,
    variance: torch.Tensor,
    older: torch.Tensor,
    free: torch.Tensor,
    segment: int,
    shares: Sequence[int],
) -> torch.Tensor:
    """Mark the best tokens of each segment: more of them where keys vary more.

    Segments are ordered by mean variance; the lowest third (rounded down) keeps the
    first share, those up to two thirds (rounded down) the second, others the third.

    Args:
        score: [R, T] floating point.
        variance: [R, T] floating point.
        older: [R, T] bool, tokens in segments: True up to some point, then False.
        free: [R, T] bool, tokens that need to be chosen in order to stay.
        segment: tokens per segment.
        shares: three numbers of tokens, see above.

    Returns:
        [R, T] bool.
    """
    num_tokens = score.shape[-1]
    segment = min(segment, num_tokens)
    pad = (0, -num_tokens % segment)
    inside = F.pad(older, pad).unflatten(-1, (-1, segment))
    known = F.pad(torch.where(older, variance.double(), 0.0), pad)
    mean = known.unflatten(-1, (-1, segment)).sum(-1) / inside.sum(-1)  # NaN: empty
    num_segments = inside.any(-1).sum(-1, keepdim=True)
    from_top = ranks_within(mean, torch.zeros_like(mean, dtype=torch.int64))
    place = num_segments - 1 - from_top
    low, middle, high = shares
    share = torch.where(place < 2 * num_segments // 3, middle, high)
    share = torch.where(place < num_segments // 3, low, share)
    index = torch.arange(num_tokens, device=score.device) // segment
    index = index.expand_as(score)
    is_choosable = older & free
    group = torch.where(is_choosable, index, share.shape[-1])
    return is_choosable & (ranks_within(score, group) < share.gather(-1, index))


def lag_spread(states: torch.Tensor, valid: torch.Tensor, chunk: int) -> torch.Tensor:
    """Measure how far the channels of the mean over layers spread, mean over heads.

    Each channel is scaled by its range in the chunk before; the first chunk is not.

    Args:
        states: [E, L, H, T, D] floating point, cached keys or values.
        valid: [E, L, H, T] bool, False on padding, whose states may hold anything.
        chunk: tokens per chunk.

    Returns:
        [E, T] float32.
    """
    # A sum over layers in float64, a summand, and four float32 copies of the mean.
    event_bytes = 32 * states[0, 0].numel()

    def of_chunk(states: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return _spread_of_mean(states, valid, chunk)

    spread = map_pairs(of_chunk, event_bytes, states[:, None], valid[:, None])
    return spread[:, 0]


def _spread_of_mean(
    states: torch.Tensor, valid: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Return [n, T] of states [n, L, H, T, D]; see `lag_spread`."""
    num_tokens = states.shape[3]
    chunk = min(chunk, num_tokens)
    num_layers = valid.sum(1)  # [n, H, T]
    mean = states.new_zeros(states[:, 0].shape, dtype=torch.float64)
    for layer, is_held in zip(states.unbind(1), valid.unbind(1), strict=True):
        mean += torch.where(is_held[..., None], layer, 0.0)
    mean /= num_layers.clamp(min=1)[..., None]
    mean = F.pad(mean.float(), (0, 0, 0, -num_tokens % chunk))
    mean = mean.unflatten(2, (-1, chunk))  # [n, H, chunks, chunk, D]
    low, high = mean.amin(3, keepdim=True), mean.amax(3, keepdim=True)
    shift = F.pad(low[:, :, :-1], (0, 0, 0, 0, 1, 0))
    width = F.pad((high - low)[:, :, :-1] + LAG_EPS, (0, 0, 0, 0, 1, 0), value=1.0)
    spread = ((mean - shift) / width).std(-1).flatten(2)[..., :num_tokens]
    is_held = num_layers > 0
    total = torch.where(is_held, spread, 0.0).sum(1)
    return total / is_held.sum(1).clamp(min=1)
