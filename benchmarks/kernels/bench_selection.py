"""Times the operations that select tokens: in Triton, and their references beside them.

    python -m benchmarks.kernels.bench_selection

Needs a CUDA device, ends with status 2 without one. Results of both are compared before
anything is timed; the run stops where they differ. Each line is one JSON record.

`milliseconds` is the median of a call's time on the device. Before each call the L2
cache is overwritten, which also takes longer than the host needs to launch the call.
`bytes` is what a call must read and write at least: its arguments and results, once.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, is_dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import provenance
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.ranking import (
    fill_next_best,
    resize,
    top_k_mask,
)
from vllm_kvpolicy.kernels.segment_quota import (
    pick_by_quota,
    segment_quota,
    segment_quota_ref,
    to_fixed_point,
)
from vllm_kvpolicy.policies.allocators.ams import PRESETS

MODULE = "benchmarks.kernels.bench_selection"
IMPLEMENTATIONS = ("triton", "reference")
FLUSHED_BYTES = 2**30
SINKS, RECENT, PAGE = 4, 32, 16
Call = tuple[Operation[..., Any], tuple[Any, ...], dict[str, Any]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1536, 2560])
    parser.add_argument("--repeats", type=int, default=50)
    return parser.parse_args()


def make_calls(num_rows: int, num_tokens: int, device: str) -> Iterator[Call]:
    """Yield one call of each operation, as an event of the default AMS preset has it.

    Two thirds of the tokens are kept.

    Args:
        num_rows: events * layers * KV heads.
        num_tokens: tokens held per row.
        device: where tensors lie.
    """
    generator = torch.Generator(device).manual_seed(num_rows + num_tokens)
    shape = (num_rows, num_tokens)
    score = torch.rand(shape, generator=generator, device=device)
    position = torch.arange(num_tokens, device=device)
    edge = (position < SINKS) | (position >= num_tokens - RECENT)
    must_keep = edge.expand(shape).contiguous()
    valid = torch.ones_like(must_keep)
    lengths = torch.full((num_rows,), num_tokens, device=device)
    budget = torch.full_like(lengths, 2 * num_tokens // 3)

    mass = torch.rand(shape, generator=generator, device=device).double() ** 8
    mass = to_fixed_point(mass / mass.sum(-1, keepdim=True))
    config = PRESETS["default"]
    cuts = {**config.cuts, "min_quota": config.min_quota}
    rows = (mass, lengths, must_keep, budget - SINKS - RECENT)
    made = segment_quota_ref(*rows, **cuts)
    yield segment_quota, rows, cuts
    group = made.segment_of.masked_fill(must_keep, made.quotas.shape[-1])
    yield pick_by_quota, (score, group, made.quotas), {}

    yield top_k_mask, (score, must_keep, valid, budget), {}
    chosen = top_k_mask.reference(score, must_keep, valid, budget)
    yield fill_next_best, (chosen, score, valid, budget + 8), {}
    # Up to the next whole page.
    pages = lengths // PAGE, -(-budget // PAGE)
    yield resize, (chosen, score, must_keep, *pages, PAGE), {}


def tensors(values: Any) -> list[torch.Tensor]:
    """List the tensors of a call's arguments or of its result."""
    if isinstance(values, torch.Tensor):
        return [values]
    items = astuple(values) if is_dataclass(values) else values
    return [item for item in items if isinstance(item, torch.Tensor)]


def check(call: Call) -> int:
    """Compare the implementations of one call; exit if they differ.

    Returns:
        Bytes of its arguments and results.
    """
    operation, args, kwargs = call
    got, want = (
        tensors(operation.implementation(which)(*args, **kwargs))
        for which in IMPLEMENTATIONS
    )
    if not all(map(torch.equal, got, want)):
        sys.exit(f"{operation.name}: differs from its reference; nothing is timed")
    return sum(x.numel() * x.element_size() for x in [*tensors(args), *got])


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time of one call on the device in milliseconds, after three untimed."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    pairs = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        pairs.append((start, end))
    return statistics.median(start.elapsed_time(end) for start, end in pairs[3:])


def machine() -> dict[str, Any]:
    """Return what the numbers hold for."""
    return {
        **provenance.collect(MODULE),
        "triton": provenance.package_version("triton"),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(),
    }


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        print("bench_selection needs a CUDA device, found none", file=sys.stderr)
        sys.exit(2)
    made_with = machine()
    for num_rows in args.rows:
        for num_tokens in args.tokens:
            for call in make_calls(num_rows, num_tokens, "cuda"):
                size = check(call)
                operation, values, options = call
                for which in IMPLEMENTATIONS:
                    run = partial(operation.implementation(which), *values, **options)
                    spent = median_ms(run, args.repeats)
                    record = {
                        "operation": operation.name,
                        "implementation": which,
                        "rows": num_rows,
                        "tokens": num_tokens,
                        "milliseconds": round(spent, 4),
                        "bytes": size,
                        "bytes_per_second": round(size / spent * 1e3),
                        "repeats": args.repeats,
                    }
                    print(json.dumps(record | made_with), flush=True)


if __name__ == "__main__":
    main()
