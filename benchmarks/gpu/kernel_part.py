"""Owns part e: every implementation of every operation, beside what the memory can do.

What is timed has been compared with the reference first. The scripts of
benchmarks/kernels run, too, those that take `--device`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.kernel_checks import check_operation, outputs, reference_device
from benchmarks.gpu.kernel_inputs import (
    MAKERS,
    SMALL_SIZES,
    Arguments,
    Size,
    make,
    operations,
)
from benchmarks.gpu.plan import Options, Part, Verdict
from benchmarks.gpu.record import ROOT, Record
from benchmarks.gpu.timing import copy_bytes_per_second, median_ms
from vllm_kvpolicy.kernels.libraries import CUDA
from vllm_kvpolicy.kernels.paged import PagedTokens

SIZES = {
    "1 event": Size(events=1),
    "4 events": Size(events=4),
    "2 events, 2600 tokens": Size(tokens=2600, budget=2048),
}
CHECKED = "1 event"
TINY_SIZES = {"1 event": SMALL_SIZES["small"]}
COPY, SEED, REPEATS = "copy", 3, 100
LIMIT_S, SCRIPT_LIMIT_S = 25.0, 90.0
SCRIPTS = ROOT / "benchmarks" / "kernels"
OTHER_PART = "bench_block_tables"
TINY_SCRIPTS = {"bench_segment_quota": ["--tokens=96", "--budget=72", "--rows=4"]}


def device_of_run() -> torch.device:
    """Return the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def implementations(label: str) -> list[str]:
    """Return what an operation can be run with here."""
    operation = operations()[label.partition(",")[0]]
    if not torch.cuda.is_available():
        return ["reference"]
    has_cuda = operation.preference.in_cuda and CUDA.path.exists()
    return ["reference", "triton", *["cuda"] * has_cuda]


def sizes(options: Options) -> dict[str, Size]:
    """Return the sizes by name."""
    return TINY_SIZES if options.is_tiny else SIZES


def scripts(options: Options) -> list[str]:
    """Return the scripts that can be told where to run."""
    if options.is_tiny:
        return list(TINY_SCRIPTS)
    return [
        path.stem
        for path in sorted(SCRIPTS.glob("bench_*.py"))
        if path.stem != OTHER_PART and '"--device"' in path.read_text()
    ]


def names(options: Options) -> list[str]:
    """Return the names of the part's measurements."""
    cells = [
        f"{label}; {size}; {which}"
        for size in sizes(options)
        for label in MAKERS
        for which in implementations(label)
    ]
    return [COPY, *cells, *scripts(options)]


def run(record: Record, options: Options) -> None:
    """Measure what the record lacks."""
    device = device_of_run()
    options.measure(
        record, COPY, 10, lambda: {"bytes_per_second": copy_bytes_per_second(device)}
    )
    for size in sizes(options):
        for label in MAKERS:
            for which in implementations(label):
                options.measure(
                    record,
                    f"{label}; {size}; {which}",
                    LIMIT_S,
                    partial(time_operation, label, size, which, device, options),
                )
    for script in scripts(options):
        call = partial(run_script, script, device, options)
        options.measure(record, script, SCRIPT_LIMIT_S, call)


def time_operation(
    label: str, name: str, which: str, device: torch.device, options: Options
) -> dict[str, Any]:
    """Time one implementation.

    Raises:
        RuntimeError: it does not do what the reference does.
    """
    size = sizes(options)[name]
    if name == CHECKED and which != "reference":
        wrong = check_operation(
            label, size, SEED, device, which, reference_device(label, device)
        )
        if wrong:
            raise RuntimeError(f"{label}, {which}: {'; '.join(wrong)}")
    operation = operations()[label.partition(",")[0]]
    arguments = make(label, size, SEED, device, device)
    moved = moved_bytes(operation.name, arguments, which)
    call = partial(operation.implementation(which), **arguments)
    milliseconds = median_ms(call, device, 2 if options.is_tiny else REPEATS)
    found = {"ms": milliseconds, "bytes": moved, "size": size.plain()}
    if operation.name == "window_usage":
        products = arguments["queries"].numel() // size.dim * size.tokens
        found["flop"] = 2 * products * size.dim
    return found


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


def run_script(script: str, device: torch.device, options: Options) -> dict[str, Any]:
    """Run a script of benchmarks/kernels; return its last line if that is JSON.

    Raises:
        CalledProcessError: it failed.
    """
    extra = TINY_SCRIPTS[script] if options.is_tiny else []
    command = [sys.executable, "-m", f"benchmarks.kernels.{script}"]
    done = subprocess.run(
        [*command, "--device", device.type, *extra],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=SCRIPT_LIMIT_S,
    )
    lines = done.stdout.strip().splitlines()
    try:
        return {"result": json.loads(lines[-1])}
    except (IndexError, ValueError):
        return {"output": lines[-40:]}


def table(record: Record, options: Options) -> tuple[Sequence[str], list[list[str]]]:
    """Return the times, and the share of what a copy reaches."""
    header = ["operation", "size", "with", "us", "GB/s", "of a copy", "TFLOP/s"]
    lines = []
    for name in names(options):
        cell = record.cells.get(name)
        if cell is None or "ms" not in cell:
            continue
        seconds = 1e-3 * cell["ms"]
        speed = cell["bytes"] / seconds
        flop = cell.get("flop")
        lines.append(
            [
                *name.split("; "),
                f"{1e6 * seconds:.1f}",
                f"{speed / 1e9:.0f}",
                f"{speed / record.cells[COPY]['bytes_per_second']:.0%}",
                "-" if flop is None else f"{flop / seconds / 1e12:.1f}",
            ]
        )
    return header, lines


def verdicts(record: Record, options: Options) -> list[Verdict]:
    """Return nothing: there are no targets for single operations."""
    return []


PARTS = {
    "e": Part(
        "every implementation of every operation, beside the speed of the memory",
        run,
        names,
        table,
        verdicts,
    )
}
