"""Cuts rows into segments, shares a budget among them, and picks their best tokens.

Source: csrc/cpu/segment_quota.cpp and mass.cpp. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.cpu.library import load
from vllm_kvpolicy.kernels.native.library import as_rows
from vllm_kvpolicy.kernels.segment_quota import (
    SegmentQuotas,
    max_segments,
    num_thresholds,
)


def segment_quota(
    mass: torch.Tensor,
    lengths: torch.Tensor,
    exempt: torch.Tensor,
    total: torch.Tensor,
    *,
    segment_mass: float,
    min_segment: int,
    max_segment: int,
    min_quota: int,
    by_mass: bool = True,
) -> SegmentQuotas:
    """Segment every row and share `total` tokens among its segments.

    Exact; see `kernels.segment_quota.segment_quota_ref`.

    Raises:
        ImportError: the kernels were not built.
        ValueError: `mass` is of floating point, which has no exact sums.
        RuntimeError: a tensor has another dtype, size or device.
    """
    if mass.dtype != torch.int64:
        raise ValueError(f"mass: expected int64 units, got {mass.dtype}")
    load()
    num_rows, num_tokens = mass.shape
    bound = max_segments(num_tokens, segment_mass, min_segment, max_segment)
    segments = mass.new_empty((num_rows, bound, 2))
    quotas = mass.new_empty((num_rows, bound))
    segment_of = mass.new_empty((num_rows, num_tokens))
    torch.ops.vllm_kvpolicy_cpu.segment_quota(
        segments.flatten(1),
        quotas,
        segment_of,
        as_rows(mass),
        lengths[:, None],
        as_rows(exempt),
        total[:, None],
        segment_mass,
        num_thresholds(segment_mass),
        min_segment,
        max_segment,
        min_quota,
        by_mass,
    )
    return SegmentQuotas(segments, quotas, segment_of)


def pick_by_quota(
    score: torch.Tensor, group: torch.Tensor, quotas: torch.Tensor
) -> torch.Tensor:
    """Mark the best tokens of each group, as many as its quota.

    Exact; see `kernels.segment_quota.pick_by_quota_ref`.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    marked = score.new_empty(score.shape, dtype=torch.bool)
    rows = [as_rows(numbers) for numbers in (marked, score, group, quotas)]
    torch.ops.vllm_kvpolicy_cpu.pick_by_quota(*rows)
    return marked


def credited_mass(
    usage: torch.Tensor,
    lengths: torch.Tensor,
    credit: torch.Tensor | None,
    decay: float,
    mix: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn usage into mass, and mix in the moving average of past mass.

    Exact; see `kernels.segment_quota.credited_mass_ref`.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    mass = usage.new_empty(usage.shape, dtype=torch.float64)
    updated = usage.new_empty(usage.shape, dtype=torch.float32)
    rows = as_rows(usage), lengths.contiguous()
    old = None if credit is None else as_rows(credit)
    torch.ops.vllm_kvpolicy_cpu.credited_mass(mass, updated, *rows, old, decay, mix)
    return mass, updated
