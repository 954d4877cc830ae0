"""Owns the part `kernels`: every implementation of every operation.

What is timed has been compared with the reference first. Bytes that an operation has to
move stand beside what a large copy reaches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.draw import Arguments, Size
from benchmarks.gpu.kernel_checks import check_operation, outputs, reference_device
from benchmarks.gpu.kernel_inputs import MAKERS, SMALL_SIZES, make, operations
from benchmarks.gpu.parts import COPY, Options, Part, Table, measure_copy
from benchmarks.gpu.record import Record
from benchmarks.gpu.timing import median_ms
from vllm_kvpolicy.kernels.libraries import CUDA
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.preferences import has

CHECKED = "1 event"
SIZES = {
    CHECKED: Size(events=1),
    "4 events": Size(events=4),
    "2 events, 2600 tokens": Size(tokens=2600, budget=2048),
}
SEED, LIMIT_S = 3, 25.0


def implementations(label: str) -> list[str]:
    """Return what an operation can be run with here."""
    if not torch.cuda.is_available():
        return ["reference"]
    has_cuda = has(label.partition(",")[0], "cuda") and CUDA.path.exists()
    return ["reference", "triton", *["cuda"] * has_cuda]


@dataclass(frozen=True)
class Kernels(Part):
    """What is measured."""

    sizes: Mapping[str, Size] = field(default_factory=lambda: SIZES)
    repeats: int = 100

    def tiny(self) -> "Kernels":
        """Return one that a CPU can do."""
        return Kernels({CHECKED: SMALL_SIZES["small"]}, 2)

    def names(self, options: Options) -> list[str]:
        """Return the speed of a copy, and operation, size and implementation."""
        return [COPY] + [
            f"{label}; {size}; {which}"
            for size in self.sizes
            for label in MAKERS
            for which in implementations(label)
        ]

    def run(self, record: Record, options: Options) -> None:
        """Measure what the record lacks."""
        measure_copy(record, options)
        for name in self.names(options)[1:]:
            call = partial(self.time_operation, *name.split("; "), options.device)
            options.measure(record, name, LIMIT_S, call)

    def time_operation(
        self, label: str, name: str, which: str, device: torch.device
    ) -> dict[str, Any]:
        """Time one implementation.

        Raises:
            RuntimeError: it does not do what the reference does.
        """
        size = self.sizes[name]
        if name == CHECKED and which != "reference":
            beside = reference_device(label, device)
            wrong = check_operation(label, size, SEED, device, [which], beside)
            if wrong:
                raise RuntimeError(f"{label}, {'; '.join(wrong)}")
        operation = operations()[label.partition(",")[0]]
        arguments = make(label, size, SEED, device, device)
        moved = moved_bytes(operation.name, arguments, which)
        call = partial(operation.implementation(which), **arguments)
        milliseconds = median_ms(call, device, self.repeats)
        return {"ms": milliseconds, "bytes": moved, "size": size.plain()}

    def table(self, record: Record, options: Options) -> Table:
        """Return the times, and the share of what a copy reaches."""
        lines = []
        for name in self.names(options)[1:]:
            if name not in record.cells:
                continue
            cell = record.cells[name]
            seconds = 1e-3 * cell["ms"]
            speed = cell["bytes"] / seconds
            share = speed / record.cells[COPY]["bytes_per_second"]
            figures = f"{1e6 * seconds:.1f}", f"{speed / 1e9:.0f}", f"{share:.0%}"
            lines.append([*name.split("; "), *figures])
        return ["operation", "size", "with", "us", "GB/s", "of a copy"], lines


def moved_bytes(name: str, arguments: Arguments, which: str) -> int:
    """Return the bytes that an operation has to read and write, each once."""
    tensors = [each for each in arguments.values() if isinstance(each, torch.Tensor)]
    if name == "compact_pages":
        pages = arguments["pages"]
        token = pages.shape[-1] * pages.element_size()
        return 2 * token * len(arguments["source_slots"]) + sum(
            each.nbytes for each in tensors[1:]
        )
    if name == "save_rows":
        saved, targets = arguments["saved"], arguments["targets"]
        kept = int((targets > 0).sum())
        return 2 * kept * saved[0].nbytes + targets.nbytes
    if name == "until_attention":
        held, pages = int(arguments["lengths"].sum()), ("keys", "values", "until")
        token = sum(arguments[part][0, 0].nbytes for part in pages)
        others = [v for k, v in arguments.items() if k not in pages]
        return held * token + sum(
            each.nbytes for each in others if isinstance(each, torch.Tensor)
        )
    given = sum(each.nbytes for each in tensors)
    if name == "page_tables":
        return given
    if name == "paged_gates":
        weights = arguments["weights"].tensors().values()
        token = arguments["keys"].shape[-1] * arguments["weights"].first.element_size()
        return (
            given
            + arguments["token"].numel() * (token + 4)
            + sum(each.nbytes for each in weights)
        )
    for paged in arguments.values():
        if isinstance(paged, PagedTokens):
            token = paged.shape[-1] * paged.pools[0].element_size()
            given += int(arguments["lengths"].sum()) * token
    results = outputs(operations()[name], which, arguments, poison=False)
    return given + sum(each.nbytes for each in results.values())
