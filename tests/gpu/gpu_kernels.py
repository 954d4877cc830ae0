"""Every twin on the GPU against its reference on the CPU, at the sizes of a real event.

Fresh random numbers each time; fresh memory on the GPU is poisoned.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.kernel_checks import check_operation
from benchmarks.gpu.kernel_inputs import MAKERS, REAL_SIZES, Size, operations
from vllm_kvpolicy.kernels.cuda.library import LIBRARY

FAR = "far"
WITH_POOL = (
    "window_usage",
    "paged_norms",
    "paged_cosines",
    "paged_projections",
    "paged_pair_projections",
    "compact_pages",
    "until_attention",
    "paged_gates",
    "page_bounds",
    "page_scores",
)


def check_all(checks: Any) -> None:
    """Check all twins; those in CUDA C++ where the extension was built."""
    check_twins(checks, "triton", torch.device("cuda"), REAL_SIZES)
    with checks.case("CUDA C++") as notes:
        if not LIBRARY.exists():
            notes.append("NOT RUN: the extension was not built")
    if LIBRARY.exists():
        check_twins(checks, "cuda", torch.device("cuda"), REAL_SIZES)


def check_twins(
    checks: Any, which: str, device: torch.device, sizes: Mapping[str, Size]
) -> None:
    """Check one implementation of every operation that has it.

    Args:
        checks: a gpu_check.Checks.
        which: one of dispatch.IMPLEMENTATIONS.
        device: where it runs.
        sizes: by name; only operations that read or write a pool run at FAR.
    """
    seed = time.time_ns() % 2**31
    known = operations()
    for label in MAKERS:
        name = label.partition(",")[0]
        if which == "cuda" and not known[name].in_cuda:
            continue
        with checks.case(f"{label}, {which}") as notes:
            wrong = []
            for size_name, size in sizes.items():
                if size_name == FAR and name not in WITH_POOL:
                    continue
                found = check_operation(label, size, seed, device, which)
                wrong += [f"{size_name}: {sentence}" for sentence in found]
            notes.append(f"seed {seed}")
            assert not wrong, "; ".join(wrong)
