"""Every twin on the GPU against its reference, at the sizes of a real event.

Small sizes have their reference on the CPU. So have the real sizes of what chooses
tokens, where ties must fall as they do there. What reads or writes keys and values has
the reference of real sizes on the GPU too: plain PyTorch in float32, which the small
sizes hold to the CPU's. Fresh random numbers each time, drawn where the reference runs;
fresh memory on the GPU is poisoned.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.gpu.draw import CPU
from benchmarks.gpu.kernel_checks import WITH_POOL, check_operation, reference_device
from benchmarks.gpu.kernel_inputs import (
    MAKERS,
    REAL_SIZES,
    SMALL_SIZES,
    Size,
)
from vllm_kvpolicy.kernels.libraries import CUDA
from vllm_kvpolicy.kernels.preferences import has

FAR = "far"


def check_all(checks: Any) -> None:
    """Check all twins; those in CUDA C++ where the extension was built."""
    with checks.case("CUDA C++") as notes:
        if not CUDA.path.exists():
            notes.append("NOT RUN: the extension was not built")
    twins = ["triton", *["cuda"] * CUDA.path.exists()]
    check_twins(checks, twins, torch.device("cuda"), SMALL_SIZES, REAL_SIZES)


def check_twins(
    checks: Any,
    twins: Sequence[str],
    device: torch.device,
    small: Mapping[str, Size],
    real: Mapping[str, Size],
) -> None:
    """Check implementations of every operation, those that it has.

    Args:
        twins: some of dispatch.IMPLEMENTATIONS.
        small: sizes by name, for the reference on the CPU.
        real: sizes by name; only operations that read or write a pool run at FAR.
    """
    seed = time.time_ns() % 2**31
    for label in MAKERS:
        name = label.partition(",")[0]
        own = [twin for twin in twins if has(name, twin)]
        beside = reference_device(label, device)
        cases = [(f"small, {each}", size, CPU) for each, size in small.items()]
        cases += [
            (each, size, beside)
            for each, size in real.items()
            if each != FAR or name in WITH_POOL
        ]
        with checks.case(f"{label}, {' and '.join(own)}") as notes:
            wrong = []
            for case, size, where in cases:
                found = check_operation(label, size, seed, device, own, where)
                wrong += [f"{case}, {sentence}" for sentence in found]
            notes.append(f"seed {seed}")
            assert not wrong, "; ".join(wrong)
