"""Compiles the package's Triton kernels for an H200 on a machine without a GPU."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import vllm_kvpolicy.kernels.triton as package
from benchmarks.gpu.kernel_inputs import CPU, MAKERS, Arguments, Size, make, operations
from vllm_kvpolicy.kernels.visibility import Decisions

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 99 * 1024  # of a program, on the smallest cards that are served
SIZES = (
    Size(1, 2, 2, 4, 600, 128, 32, 256, 16, torch.bfloat16),
    Size(1, 1, 2, 7, 600, 64, 8, 256, 32, torch.float16),
    Size(1, 1, 2, 4, 600, 128, 32, 256, 16, torch.float32),
    Size(1, 1, 2, 1, 600, 80, 64, 256, 16, torch.bfloat16),
    Size(1, 1, 2, 8, 1200, 256, 64, 512, 16, torch.bfloat16),
    Size(1, 1, 2, 2, 40_000, 32, 32, 1024, 16, torch.float16),
)
# Of one operation: bytes and an odd head, and latents (MLA).
MORE_SIZES = {
    "compact_pages": (
        Size(1, 1, 2, 1, 600, 128, 32, 256, 16, torch.uint8),
        Size(1, 1, 2, 1, 600, 32, 32, 256, 16, torch.uint8),
        Size(1, 1, 2, 1, 600, 33, 32, 256, 16, torch.float16),
    ),
    "window_usage": (Size(1, 1, 1, 128, 600, 576, 64, 256, 16, torch.bfloat16),),
}
# What else operations are given, of which kernels of their own are made.
CHANGES: dict[str, Callable[[Arguments], list[Arguments]]] = {
    "credited_mass": lambda given: [{"credit": None}],
    "fill_next_best": lambda given: [{"target": 99}, doubled(given)],
    "pooled_usage": lambda given: [{"suffix_pad": pad} for pad in ("mean", "none")],
    "read_survivors": lambda given: [{"first": given["first"].int()}],
    "resize": lambda given: [doubled(given)],
    "segment_quota": lambda given: [{"by_mass": False}],
    "survivor_moves": lambda given: [{"unmoved": None}],
    "top_k_mask": lambda given: [{"budget": 99}, doubled(given)],
    "write_until": lambda given: [
        {"shift": 0},
        {"decisions": Decisions(given["decisions"].values > 0)},
    ],
}


def doubled(given: Arguments) -> Arguments:
    return {"score": given["score"].double()}


def launch_all() -> None:
    """Call every twin with what real servers give it."""
    known = operations()
    for label in MAKERS:
        name = label.partition(",")[0]
        twin = known[name].implementation("triton")
        for size in (*SIZES, *MORE_SIZES.get(name, ())):
            given = make(label, size, 0, CPU)
            for change in ({}, *CHANGES.get(name, lambda given: [])(given)):
                twin(**given | change)


# Stands for one device that can be compiled for but not be used.
NO_DEVICE = SimpleNamespace(
    get_current_target=lambda: TARGET,
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)


def written_kernels() -> dict[str, JITFunction]:
    """Return every kernel and device function of the package as STEM.NAME."""
    found = {}
    for module in iter_modules(package.__path__):
        loaded = import_module(f"{package.__name__}.{module.name}")
        for name, value in vars(loaded).items():
            if isinstance(value, triton.runtime.Autotuner):
                raise TypeError(f"{module.name}.{name}: choose from sizes, not by time")
            if isinstance(value, JITFunction) and value.__module__ == loaded.__name__:
                found[f"{module.name}.{name}"] = value
    return found


def used_by(kernel: JITFunction) -> Iterator[JITFunction]:
    """Yield a kernel and the device functions that its source names."""
    yield kernel
    for name in kernel.fn.__code__.co_names:
        used = kernel.fn.__globals__.get(name)
        if isinstance(used, JITFunction):
            yield from used_by(used)


def main(folder: Path, step: int) -> None:
    """Compile and write the PTX of each variant.

    Args:
        folder: for the files.
        step: each kernel's first launch is compiled, and then every step-th.
    """
    driver.set_active(NO_DEVICE)
    names = {id(kernel): name for name, kernel in written_kernels().items()}
    variants: dict[str, dict[str, str]] = {name: {} for name in names.values()}
    run, launches = JITFunction.run, Counter()

    def compile_only(kernel: JITFunction, *args, grid, warmup, **options):
        launches[kernel] += 1
        if launches[kernel] % step != 1 % step:
            return None
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        assert compiled.metadata.target == TARGET and compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_BYTES, kernel.__name__
        for part in used_by(kernel):
            if id(part) in names:
                name = names[id(part)]
                variants[name][f"{name}.{compiled.hash}.ptx"] = compiled.asm["ptx"]
        return compiled

    JITFunction.run = compile_only
    launch_all()
    for texts in variants.values():
        for file, text in texts.items():
            (folder / file).write_text(text)
    print(json.dumps({name: sorted(texts) for name, texts in variants.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
