"""Runs vLLM's attention kernels over tables of both kinds."""

from typing import Any

from support.attention import folded_oracles, oracles


def check_all(checks: Any) -> None:
    """Check attention over equal-length tables, then over per-head tables."""
    oracles.check_on_gpu(checks)
    folded_oracles.check_on_gpu(checks)
