"""Times window attention in Triton on a GPU, after checking it against the reference.

    python -m benchmarks.kernels.bench_window_usage --events 1 --tokens 2048

Keys lie on shuffled pages of one cache for all layers, each page's values after its
keys, and queries in a pool of windows, as in the engine. The check compares every
number and stops the run if one differs. Between two timed calls the L2 cache is filled
with other data. The last line is one JSON record with everything needed to run it
again. Exits with 2 where there is no GPU.
"""

import argparse
import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.window_usage import (
    window_usage,
    window_usage_ref,
)

# The GPU's matrix units and exp round otherwise than the reference's: a logit of some
# tens by a few 1e-6, and so a probability by as much of itself.
RELATIVE, ABSOLUTE = 1e-4, 1e-6
NEAR = 1e-5  # share of a row's mass that may be rounding
UNTIMED = 5
FLUSH_BYTES = 2**30  # much more than any L2 cache


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1, help="E")
    parser.add_argument("--layers", type=int, default=32, help="L")
    parser.add_argument("--kv-heads", type=int, default=8, help="H")
    parser.add_argument(
        "--group", type=int, default=4, help="G, query heads per KV head"
    )
    parser.add_argument("--head-size", type=int, default=128, help="D")
    parser.add_argument("--window", type=int, default=32, help="W, newest queries")
    parser.add_argument("--tokens", type=int, default=2048, help="T, held per row")
    parser.add_argument("--page-size", type=int, default=16, help="N, tokens per page")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--mass", type=float, help="also count nuclei of that mass")
    parser.add_argument(
        "--own-pools", action="store_true", help="one allocation per layer"
    )
    parser.add_argument("--repeats", type=int, default=100)
    return parser.parse_args()


def make_inputs(args: argparse.Namespace, device: str) -> tuple:
    """Return queries, keys, lengths and scale; a few keys attract most attention."""
    torch.manual_seed(0)
    options = {"device": device, "dtype": getattr(torch, args.dtype)}
    rows = (args.events, args.layers, args.kv_heads)
    per_row = -(-args.tokens // args.page_size)
    num_pools = args.layers if args.own_pools else 1
    num_pages = math.prod(rows) * per_row // num_pools
    size = (num_pages, args.page_size, 2 * args.head_size)
    pools = [torch.randn(size, **options) for _ in range(num_pools)]
    for pool in pools:
        pool[:, 0] *= 3
    keys = [pool[..., : args.head_size] for pool in pools] * (args.layers // num_pools)
    tables = [torch.randperm(num_pages, device=device) for _ in pools]
    shape: tuple[int, ...] = (args.layers, args.events, args.kv_heads, per_row)
    pages = torch.cat(tables).view(shape).transpose(0, 1).contiguous()
    num_q_heads = args.kv_heads * args.group
    shape = (args.layers, args.events, args.window, num_q_heads, args.head_size)
    queries = torch.randn(shape, **options).permute(1, 0, 3, 2, 4)
    lengths = torch.full(rows, args.tokens, device=device)
    paged = PagedTokens(keys, pages, args.tokens)
    return queries, paged, lengths, args.head_size**-0.5


def verify(inputs: tuple, mass: float | None) -> dict[str, float]:
    """Compare with the reference, return how far they are apart; exit if too far."""
    got, want = window_usage(*inputs, mass), window_usage_ref(*inputs, mass)
    apart: dict[str, float] = {}
    for name in ("mean", "last"):
        found, expected = getattr(got, name), getattr(want, name)
        apart[f"max_error_{name}"] = float((found - expected).abs().max())
        if not torch.allclose(found, expected, rtol=RELATIVE, atol=ABSOLUTE):
            sys.exit(f"{name}: differs from the reference by {apart}; not timed")
    if mass is not None:
        least = window_usage_ref(*inputs, mass - NEAR).nucleus
        most = window_usage_ref(*inputs, min(mass + NEAR, 1.0)).nucleus
        apart["rows_with_other_counts"] = int((got.nucleus != want.nucleus).sum())
        if not bool(((least <= got.nucleus) & (got.nucleus <= most)).all()):
            sys.exit(f"nucleus: differs from the reference, {apart}; not timed")
    return apart


def times_ms(call: Callable[[], object], repeats: int) -> list[float]:
    """GPU time of each call in milliseconds, L2 filled with other data before it.

    That takes long enough for the host to queue the call in the meantime.
    """
    other = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = []
    for _ in range(UNTIMED + repeats):
        other.zero_()
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs[UNTIMED:]]


def commit() -> str:
    """The checkout's commit, or "unknown" outside git."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        print("bench_window_usage: needs a CUDA device, found none", file=sys.stderr)
        sys.exit(2)
    import triton  # not on every machine without a GPU

    inputs = make_inputs(args, "cuda")
    apart = verify(inputs, args.mass)
    times = times_ms(lambda: window_usage(*inputs, args.mass), args.repeats)
    queries, keys = inputs[:2]
    seconds = statistics.median(times) / 1e3
    passes = 2 if args.mass is None else 3
    num_keys = math.prod(keys.shape[:4])
    key_bytes = passes * num_keys * args.head_size * queries.element_size()
    flops = passes * 2 * num_keys * args.group * args.window * args.head_size
    record = {
        "ms": round(seconds * 1e3, 4),
        "ms_fastest": round(min(times), 4),
        "ms_slowest": round(max(times), 4),
        "passes_over_keys": passes,
        "key_bytes_read": key_bytes,
        "key_bytes_per_second": round(key_bytes / seconds),
        "dot_flops_per_second": round(flops / seconds),
        **apart,
        **vars(args),
        "device_name": torch.cuda.get_device_name(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }
    print(f"verified; window_usage: median {record['ms']} ms")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
