"""Times one batched AMS selection, after checking it against loops over tokens.

    python -m benchmarks.kernels.bench_segment_quota --threads 1

The check compares a few rows of the timed input with tests/support/brute_ams.py, and
stops the run if they differ. The last line is one JSON record with everything needed to
run it again.
"""

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.support.brute_ams import brute_choose
from vllm_kvpolicy.kernels.segment_quota import (
    credited_mass,
    segment_quota_ref,
    to_fixed_point,
)
from vllm_kvpolicy.policies.allocators.ams import (
    PRESETS,
    AMSConfig,
    select,  # noqa: E402
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1536, help="T, held per row")
    parser.add_argument("--budget", type=int, default=1024, help="K, kept per row")
    parser.add_argument("--rows", type=int, default=28 * 4, help="layers x KV heads")
    parser.add_argument("--preset", choices=list(PRESETS), default="default")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def make_rows(args: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """Usage with two sinks and a flat newest window, random scores, some credit."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.rows, args.tokens)
    usage = torch.rand(shape, generator=generator) ** 6 / args.tokens
    usage[:, :2] = 0.1
    usage[:, -32:] = usage.amax(-1, keepdim=True)
    score = torch.rand(shape, generator=generator)
    credit = torch.rand(args.rows, args.budget, generator=generator) / args.tokens
    return tuple(x.to(args.device) for x in (usage, score, credit))


def verify(
    rows: tuple[torch.Tensor, ...], budget: int, config: AMSConfig, count: int = 4
) -> None:
    """Compare the first rows with loops over tokens; exit if a row differs."""
    usage, score, credit = (x[:count] for x in rows)
    num_tokens = usage.shape[-1]
    got = select(usage, score, budget, config, credit)
    credit = torch.nn.functional.pad(credit, (0, num_tokens - budget))
    must = {*range(config.sinks), *range(num_tokens - config.recent, num_tokens)}
    for r in range(count):
        keep, segments, quotas, _ = brute_choose(
            usage[r].tolist(),
            score[r].tolist(),
            must,
            budget,
            config.model_dump(),
            credit[r].tolist(),
        )
        used = len(segments)
        same = (
            got.keep[r].tolist() == keep
            and got.segments[r, :used].tolist() == segments
            and got.quotas[r, :used].tolist() == quotas
        )
        if not same:
            sys.exit(f"row {r}: the selection differs from the loops; not timed")


def median_ms(call: object, device: str, repeats: int) -> float:
    """Median wall time of one call in milliseconds, after three untimed ones."""
    times = []
    for i in range(repeats + 3):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        if i >= 3:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


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
    torch.set_num_threads(args.threads)
    config = PRESETS[args.preset]
    rows = make_rows(args)
    verify(rows, args.budget, config)
    usage, score, credit = rows

    lengths = torch.full((args.rows,), args.tokens, device=args.device)
    exempt = torch.zeros_like(usage, dtype=torch.bool)
    mass = to_fixed_point(
        credited_mass(usage, lengths, None, config.ema_decay, config.ema_mix)[0]
    )

    def quotas_only() -> None:
        segment_quota_ref(
            mass,
            lengths,
            exempt,
            torch.full_like(lengths, args.budget),
            segment_mass=config.segment_mass,
            min_segment=config.min_segment,
            max_segment=config.max_segment,
            min_quota=config.min_quota,
        )

    def whole() -> None:
        select(usage, score, args.budget, config, credit)

    record = {
        "select_ms": round(median_ms(whole, args.device, args.repeats), 2),
        "segment_quota_ms": round(median_ms(quotas_only, args.device, args.repeats), 2),
        "tokens": args.tokens,
        "budget": args.budget,
        "rows": args.rows,
        "preset": args.preset,
        "repeats": args.repeats,
        "threads": args.threads,
        "device": args.device,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }
    if args.device != "cpu":
        record["device_name"] = torch.cuda.get_device_name()
    print(f"verified; select: median {record['select_ms']} ms")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
