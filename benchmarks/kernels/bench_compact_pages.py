"""Times the twins that move kept tokens, in Triton and in CUDA C++.

    python setup.py build_ext --inplace
    python -m benchmarks.kernels.bench_compact_pages

Needs a CUDA device, ends with status 2 without one, and the kernels in CUDA C++. What
each twin moves is compared with the reference, bit for bit, before anything is timed;
the run stops where they differ. Each line is one JSON record.

One call moves the values of a batch of events: random survivors of every row, on
shuffled pages of one cache. `owners` is the share of pages that change owner.
`milliseconds` is the median of a call's time on the device. Before each call the L2
cache is overwritten, which also takes longer than the host needs to launch the call.
`bytes` are those of the tokens that move, read and written once: the least there is,
without slots and scratch.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import provenance
from vllm_kvpolicy.kernels.compact_pages import compact_pages

MODULE = "benchmarks.kernels.bench_compact_pages"
TWINS = ("triton", "cuda")
FLUSHED_BYTES = 2**30
SINKS, RECENT = 4, 32
Moves = dict[str, torch.Tensor]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--owners", type=float, nargs="+", default=[0.0, 0.25])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1536, help="held per row")
    parser.add_argument("--budget", type=int, default=1024, help="kept per row")
    parser.add_argument("--repeats", type=int, default=50)
    return parser.parse_args()


def make_moves(
    args: argparse.Namespace, events: int, owners: float, device: str
) -> tuple[torch.Tensor, Moves]:
    """Return a cache [P, N, 2D] and what is moved in it.

    Args:
        args: the sizes; `tokens` and `budget` are whole pages.
        events: E, a row each for every layer and KV head.
        owners: share of pages that another row takes over; 0 gives no mask.
        device: where tensors lie.
    """
    generator = torch.Generator(device).manual_seed(events)
    page, rows = args.block_size, events * args.layers * args.heads
    held, kept = args.tokens // page, args.budget // page
    random = partial(torch.rand, generator=generator, device=device)
    before = random(rows * held).argsort().view(rows, held) + 1
    shape = (rows * held + 1, page, 2 * args.head_size)
    bits = torch.randint(
        -(2**15), 2**15, shape, generator=generator, dtype=torch.int16, device=device
    )

    score = random(rows, args.tokens)
    score[:, :SINKS] = score[:, -RECENT:] = 2
    chosen = score.topk(args.budget).indices.sort().values
    after = before[:, :kept].clone()
    leaves = random(rows, kept) < owners
    moved = after[leaves]
    after[leaves] = moved[random(len(moved)).argsort()]

    place = torch.arange(args.budget, device=device)
    first = torch.arange(rows + 1, device=device) * args.budget
    source = before.gather(1, chosen // page) * page + chosen % page
    dest = after[:, place // page] * page + place % page
    moves = {"source_slots": source, "dest_slots": dest}
    if owners:
        moves["in_place"] = (after == before[:, :kept])[:, place // page]
    flat = {name: values.flatten() for name, values in moves.items()}
    return bits.view(torch.bfloat16), {"first": first, **flat}


def values_of(cache: torch.Tensor) -> torch.Tensor:
    """Return the half of the columns that is moved."""
    return cache[..., cache.shape[-1] // 2 :]


def check(cache: torch.Tensor, moves: Moves) -> None:
    """Compare the twins with the reference; exit if a bit differs."""
    want = cache.clone()
    compact_pages.reference(values_of(want), **moves)
    for which in TWINS:
        got = cache.clone()
        compact_pages.implementation(which)(values_of(got), **moves)
        if not torch.equal(got.view(torch.int16), want.view(torch.int16)):
            sys.exit(f"{which}: differs from the reference; nothing is timed")


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time of one call on the device in milliseconds, after three untimed."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        print("bench_compact_pages needs a CUDA device, found none", file=sys.stderr)
        sys.exit(2)
    made_with: dict[str, Any] = {
        **provenance.collect(MODULE),
        "triton": provenance.package_version("triton"),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(),
    }
    for events in args.events:
        for owners in args.owners:
            cache, moves = make_moves(args, events, owners, "cuda")
            check(cache, moves)
            num_moved = int((moves["source_slots"] != moves["dest_slots"]).sum())
            num_bytes = 2 * num_moved * args.head_size * cache.element_size()
            for which in TWINS:
                twin = compact_pages.implementation(which)
                spent = median_ms(
                    partial(twin, values_of(cache), **moves), args.repeats
                )
                record = vars(args) | {
                    "implementation": which,
                    "events": events,
                    "owners": owners,
                    "milliseconds": round(spent, 4),
                    "bytes": num_bytes,
                    "bytes_per_second": round(num_bytes / spent * 1e3),
                }
                print(json.dumps(record | made_with), flush=True)


if __name__ == "__main__":
    main()
