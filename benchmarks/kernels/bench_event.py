"""Times a whole event on a CPU: in C++, by the references, and by an earlier commit.

    python -m benchmarks.kernels.bench_event --out event.json
    python -m benchmarks.kernels.bench_event --before ../earlier --out event.json

An event is what a worker does between two steps: it looks up the request, decides,
moves keys and values, and enters the survivors into its tables. The tables are those of
a real worker on the shape of SmolLM2-135M: 30 layers, 9 query heads, 3 KV heads of 64
channels, pages of 32 tokens whose keys are stored as columns. One request that holds
640 tokens has an event that is not its first.

Each contestant is a process of its own, and they take turns, another one first in each
round. `reference` is this checkout with KVPOLICY_KERNELS=reference. `before` is another
checkout, which has a copy of this file and is built like this one. Keys, values,
queries and what is remembered are the same in each round, and all of it is written
anew before it; a round in which the contestants end with other keys and values ends the
run.

`milliseconds` are on the clock, `cpu_milliseconds` of the process, which say more on a
busy machine; medians over the rounds. `ratios` are this checkout's over another's,
round by round, as median and 95 % bootstrap interval.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kvpolicy.commands.outputs import new_file

MODULE = "benchmarks.kernels.bench_event"
HERE = Path(__file__).resolve()
LAYERS, HEADS, GROUP, SIZE, PAGE = 30, 3, 3, 64, 32
BLOCKS, SINKS, RECENT, INTERVAL = 64, 4, 32, 128
UNITS = "milliseconds", "cpu_milliseconds"
OURS = "cpp"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="ams-tova")
    parser.add_argument("--tokens", type=int, default=640, help="held; whole pages")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--out", type=new_file)
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- a contestant ----------------------------------------------------------------------


class Layer:
    """What a worker reads of one of vLLM's attention layers."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache, self.impl, self.scale = kv_cache, self, SIZE**-0.5
        self.kv_cache_dtype = "auto"

    def do_kv_cache_update(
        self,
        layer: object,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write one token [1, H, D] as vLLM's kernels for CPUs do."""
        (slot,) = slots.tolist()
        keys, values = kv_cache[slot // PAGE].flatten(1).chunk(2, dim=-1)
        keys.unflatten(-1, (SIZE, PAGE))[..., slot % PAGE] = key[0]
        values.unflatten(-1, (PAGE, SIZE))[:, slot % PAGE] = value[0]


def make_config(policy: str, tokens: int) -> Any:
    """Return the settings of a server whose requests hold `tokens` before events."""
    from vllm_kvpolicy.config import KVPolicyConfig

    return KVPolicyConfig(policy, tokens - INTERVAL, INTERVAL, RECENT, SINKS)


def make_worker(policy: str, tokens: int, caches: torch.Tensor) -> Any:
    """Return the runtime of a worker whose KV caches are [L, B, H, N, 2D]."""
    from vllm_kvpolicy.kernels.rope import Rope
    from vllm_kvpolicy.policies.compose import build
    from vllm_kvpolicy.policies.ranks import ALL_HEADS, ONE_RANK
    from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
    from vllm_kvpolicy.worker.compaction import remembered
    from vllm_kvpolicy.worker.request_table import RequestTable
    from vllm_kvpolicy.worker.setup import SideTables, WorkerSetup
    from vllm_kvpolicy.worker.tiers.equal import PhysicalTables

    device = caches.device
    config = make_config(policy, tokens)
    policies = {policy: build(policy, config.resolved(policy).options)}
    needs = policies[policy].needs
    requests = RequestTable(1, BLOCKS, PAGE, device)
    setup = object.__new__(WorkerSetup)  # of parts, in place of a loaded model
    vars(setup).update(
        vllm_config=SimpleNamespace(
            instance_id="bench",
            parallel_config=SimpleNamespace(data_parallel_index=0),
            compilation_config=SimpleNamespace(cudagraph_mode=None),
        ),
        config=config,
        policies=policies,
        needs=needs,
        layers=[Layer(cache) for cache in caches],
        rope=Rope.from_theta(1e5, SIZE),
        requests=requests,
        captures=[QueryWindows(GROUP, PAGE, device)],
        tables=PhysicalTables(requests, 1, BLOCKS),
        side_tables=SideTables(
            num_requests=1,
            num_heads=LAYERS * HEADS,
            block_size=PAGE,
            max_local_tokens=RECENT + PAGE - 1,
            num_memories=len(remembered(needs)),
            is_ragged=False,
        ),
        shard=ALL_HEADS,
        ranks=ONE_RANK,
        dummy_events=lambda pool: SimpleNamespace(most_tokens=dict),
    )
    return setup.bind(keys_are_columns=True)


def make_event(policy: str, tokens: int, ordinal: int) -> Any:
    """Return an event of a request that holds `tokens`, the last page of them local."""
    from vllm_kvpolicy.protocol import CompactEvent

    budget, held = tokens - INTERVAL, tokens // PAGE
    num_dest = -(-(budget - RECENT) // PAGE)
    row = tuple(range(1, held + 1))
    footprint = make_config(policy, tokens).footprint(SINKS, PAGE, GROUP)
    frontier = held - 1 + ordinal * INTERVAL // PAGE
    return CompactEvent(
        request_id="a",
        serial=ordinal,
        policy=policy,
        ordinal=ordinal,
        position=frontier * PAGE + RECENT,
        frontier_blocks=frontier,
        budget=budget,
        sinks=SINKS,
        prompt_tokens=SINKS,
        num_global=num_dest if ordinal else 0,
        source_blocks=row[:-1],
        dest_blocks=row[:num_dest],
        local_blocks=row[-1:],
        window_blocks=tuple(range(held + 1, held + 1 + footprint.window_blocks)),
    )


def play(policy: str, tokens: int, dtype: str, threads: int) -> None:
    """Have an event for each line that comes in; answer each with a line of JSON."""
    torch.set_num_threads(threads)
    shape = LAYERS, BLOCKS, HEADS, PAGE, 2 * SIZE
    fresh = torch.randn(shape, generator=torch.Generator().manual_seed(tokens))
    fresh = fresh.to(getattr(torch, dtype))
    caches = torch.zeros_like(fresh)
    worker = make_worker(policy, tokens, caches)
    for _ in sys.stdin:
        for ordinal in (0, 1):
            caches.copy_(fresh)
            event = make_event(policy, tokens, ordinal)
            start, spent = time.perf_counter(), time.process_time()
            worker.compactor.run((event,))
            spent = time.process_time() - spent
            elapsed = time.perf_counter() - start
        digest = hashlib.sha256(caches.view(torch.uint8).numpy()).hexdigest()
        times = dict(zip(UNITS, (elapsed * 1e3, spent * 1e3), strict=True))
        print(json.dumps(times | {"digest": digest}), flush=True)


# -- the contest -----------------------------------------------------------------------


class Contestant:
    """A process that has an event on demand.

    Args:
        kernels: KVPOLICY_KERNELS; empty for what the package prefers.
    """

    def __init__(
        self, checkout: Path, args: argparse.Namespace, dtype: str, kernels: str
    ) -> None:
        script = checkout / HERE.relative_to(HERE.parents[2])
        options = {"policy": args.policy, "tokens": args.tokens, "dtypes": dtype}
        options["threads"] = args.threads
        words = [f"--{name}={value}" for name, value in options.items()]
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--play", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env=os.environ
            | {"PYTHONPATH": str(checkout), "KVPOLICY_KERNELS": kernels}
            | {"OMP_NUM_THREADS": str(args.threads)},
        )

    def play(self) -> dict[str, Any]:
        """Have an event; return its times and a digest of all keys and values."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"bench_event: a contestant ended, status {self._process.wait()}")
        return json.loads(line)

    def leave(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def contest(args: argparse.Namespace, dtype: str) -> dict[str, list[dict[str, Any]]]:
    """Let the contestants take turns; return what each round was, by contestant."""
    here = HERE.parents[2]
    players = {OURS: (here, ""), "reference": (here, "reference")}
    if args.before:
        players["before"] = args.before.resolve(), ""
    contestants = {
        name: Contestant(checkout, args, dtype, kernels)
        for name, (checkout, kernels) in players.items()
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(args.rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(contestants[name].play())
        if len({rounds[-1]["digest"] for rounds in found.values()}) > 1:
            sys.exit("bench_event: the contestants keep other tokens")
    for contestant in contestants.values():
        contestant.leave()
    return {name: rounds[1:] for name, rounds in found.items()}


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians by contestant, and paired ratios to those of this checkout."""
    from benchmarks.stats import median_ratio

    times = {
        name: {unit: [each[unit] for each in rounds] for unit in UNITS}
        for name, rounds in found.items()
    }
    record: dict[str, Any] = {
        name: {unit: round(statistics.median(own[unit]), 2) for unit in UNITS}
        for name, own in times.items()
    }
    record["ratios"] = {}
    for name in times:
        if name == OURS:
            continue
        of_units = record["ratios"][f"{name} / {OURS}"] = {}
        for unit in UNITS:
            ratio = median_ratio(times[name][unit], times[OURS][unit])
            ends = ratio.median, ratio.low, ratio.high
            of_units[unit] = dict(
                zip(("median", "low", "high"), (round(e, 3) for e in ends), strict=True)
            )
    return record


def main() -> None:
    args = parse_args()
    if args.play:
        play(args.policy, args.tokens, args.dtypes[0], args.threads)
        return
    from benchmarks import provenance
    from vllm_kvpolicy.kernels.preferences import why_not_in_cpp

    if reason := why_not_in_cpp():
        print(f"bench_event: {reason}", file=sys.stderr)
        sys.exit(2)
    record = {"provenance": provenance.collect(MODULE), "rounds": args.rounds}
    if args.before:
        words = ["git", "-C", str(args.before), "rev-parse", "HEAD"]
        record["before"] = subprocess.check_output(words, text=True).strip()
    record["results"] = {dtype: summary(contest(args, dtype)) for dtype in args.dtypes}
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
