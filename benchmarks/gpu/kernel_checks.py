"""Owns the comparison of an operation's implementations with its reference."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from benchmarks.gpu.kernel_inputs import CPU, Arguments, Size, make, operations
from vllm_kvpolicy.kernels import dispatch
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.preferences import IMPLEMENTATIONS, has, implementation_of

# Sums of at most a few thousand float32 products, added up in another order.
RELATIVE, ABSOLUTE = 1e-4, 1e-6
# Of results in half precision, or made of numbers that are: times its epsilon.
HALF_ROUNDINGS = 2
# Cuts between tokens of nearly equal probability fall by rounding.
NUCLEUS_SLACK = 1
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WITH_POOL = (
    "window_usage",
    "paged_norms",
    "paged_cosines",
    "paged_projections",
    "paged_pair_projections",
    "paged_quadratics",
    "compact_pages",
    "until_attention",
    "paged_gates",
    "page_bounds",
    "page_scores",
)
"""Operations that read or write keys and values."""
MUTATED = {
    "compact_pages": ("pages",),
    "enter_page_lists": ("table_pages", "table_first"),
    "enter_requests": ("global_blocks", "num_global", "skip", "pinned"),
    "head_page_tables": ("tables", "offsets"),
    "page_bounds": ("bounds",),
    "until_attention": ("output",),
    "write_survivors": ("survivors", "local"),
    "write_until": ("until",),
}
"""Operations whose result is what all of some arguments hold afterwards."""
COPIES = ("compact_pages", "page_bounds", "save_rows")
"""Operations that compute nothing, so that every bit has to be right, NaN's too."""
Outputs = dict[str, torch.Tensor]


def reference_device(label: str, device: torch.device) -> torch.device:
    """Return where a reference of real size runs.

    What chooses tokens has it on the CPU, where ties fall as they should; what reads
    or writes keys and values, much of them, beside its twins.
    """
    name = label.partition(",")[0]
    return device if name in (*WITH_POOL, "save_rows") else CPU


@contextmanager
def forced(which: str) -> Iterator[None]:
    """Run one implementation of every operation that has it, on any device.

    Triton runs on a CPU under its interpreter only.

    Args:
        which: one of `IMPLEMENTATIONS`.
    """
    if which not in IMPLEMENTATIONS:
        raise ValueError(f"which: expected one of {IMPLEMENTATIONS}, got {which!r}")
    before = dispatch.implementation_of
    dispatch.implementation_of = lambda name, device_type: (
        which if has(name, which) else implementation_of(name, device_type)
    )
    try:
        yield
    finally:
        dispatch.implementation_of = before


@contextmanager
def poisoned() -> Iterator[None]:
    """Let fresh tensors hold NaN, or the largest integer, until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def outputs(
    operation: Operation, which: str, arguments: Arguments, poison: bool = True
) -> Outputs:
    """Run an implementation; return everything that the contract specifies.

    Args:
        which: one of dispatch.IMPLEMENTATIONS.
        arguments: of the call; some are changed.
    """
    with poisoned() if poison else nullcontext():
        result = operation.implementation(which)(**arguments)
    found = dict(_specified(operation.name, arguments, result))
    if operation.name in COPIES:
        found = {name: _bits(values) for name, values in found.items()}
    return found


def _specified(
    name: str, arguments: Arguments, result: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    if name == "save_rows":  # the first row is nobody's
        yield "saved", arguments["saved"][1:]
    elif name == "paged_gates":  # as exact as the numbers that they are made of
        yield "result", result.to(arguments["weights"].first.dtype)
    elif name == "page_tables":
        tables, lengths = arguments["tables"], arguments["lengths"]
        column = torch.arange(tables.shape[1], device=tables.device)
        used = -(-lengths // arguments["block_size"])
        yield "tables", torch.where(column < used[:, None], tables, -1)
        yield "lengths", lengths
    elif name in MUTATED:
        yield from {key: arguments[key] for key in MUTATED[name]}.items()
        if result is not None:
            yield "result", result
    elif isinstance(result, tuple):
        yield from ((f"result {n}", each) for n, each in enumerate(result))
    elif is_dataclass(result):
        for field in fields(result):
            if getattr(result, field.name) is not None:
                yield field.name, getattr(result, field.name)
    else:
        yield "result", result


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(INTEGERS[values.element_size()])


def differences(found: Mapping[str, torch.Tensor], expected: Outputs) -> list[str]:
    """Return one sentence for each output that is not the reference's.

    Integers and masks must be equal, float32 within RELATIVE and ABSOLUTE, and floats
    in half precision within HALF_ROUNDINGS.
    """
    wrong = []
    for name, want in expected.items():
        got = found[name].to(want.device)
        if got.shape != want.shape or got.dtype != want.dtype:
            wrong.append(
                f"{name}: {got.dtype} {list(got.shape)}, expected {want.dtype} "
                f"{list(want.shape)}"
            )
            continue
        if want.is_floating_point():
            is_wrong = ~_is_near(got, want)
        elif name == "nucleus":
            is_wrong = (got - want).abs() > NUCLEUS_SLACK
        else:
            is_wrong = got != want
        if is_wrong.any():
            first = is_wrong.nonzero()[0].tolist()
            wrong.append(
                f"{name}: {int(is_wrong.sum())} of {is_wrong.numel()} differ, first at "
                f"{first}: {got[tuple(first)]}, expected {want[tuple(first)]}"
            )
    return wrong


def _is_near(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return where floats are the same up to rounding."""
    relative, absolute = RELATIVE, ABSOLUTE
    if want.element_size() < 4:
        relative = absolute = HALF_ROUNDINGS * torch.finfo(want.dtype).eps
    want = want.double()
    return (got.double() - want).abs() <= absolute + relative * want.abs()


def check_operation(
    label: str,
    size: Size,
    seed: int,
    device: torch.device,
    twins: Sequence[str],
    beside: torch.device = CPU,
) -> list[str]:
    """Compare implementations with the reference, on the same numbers.

    Args:
        label: one of kernel_inputs.MAKERS.
        twins: some of dispatch.IMPLEMENTATIONS.
        beside: where numbers are drawn and the reference runs.

    Returns:
        What is wrong, one sentence each.
    """
    operation = operations()[label.partition(",")[0]]
    arguments = make(label, size, seed, beside, beside)
    with beside, forced("reference"):  # nothing that it calls is a twin
        expected = outputs(operation, "reference", arguments, False)
    wrong = []
    for which in twins:
        arguments = make(label, size, seed, device, beside)
        found = differences(outputs(operation, which, arguments), expected)
        wrong += [f"{which}: {sentence}" for sentence in found]
    return wrong
