"""Compares how many requests run at once: write gates and stock on one small pool.

    python -m benchmarks.admission --out admission.json

Both servers run from start to end, have the same number of KV blocks, and get the same
problems in turn (A B, B A). Only the pool limits what they hold. Answers are not cut to
a length, so the gates see texts like those of their training. The scheduler counts
running requests at every step; only steps count in which another request waits.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.accuracy.client import Asked, Client
from benchmarks.accuracy.questions import questions_of
from benchmarks.load import LoadError, sampled
from benchmarks.printing import log, report
from benchmarks.rounds import RUNNING, ratios_to, summarise
from benchmarks.server import EngineSettings, Server, running
from benchmarks.serving import PACKAGED_MODEL
from benchmarks.workload import NULL_BLOCKS, block_bytes
from vllm_kvpolicy.commands.outputs import new_file, new_folder
from vllm_kvpolicy.compat import COUNTING_CLASSES

STOCK, POLICY = "stock", "wgkv"
TASKS = ("count:48", "hops:30", "mul:30", "recall:96", "sub:48", "add:30")
GATES = PACKAGED_MODEL.parent / "gates" / "wgkv-0.16.safetensors"
WAITING, USAGE = "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
SETTLE_SECONDS = 30.0
WARM_UP_TOKENS = 32
COLUMNS = {
    "mean_running": ".2f",
    "most_running": ".0f",
    "preemptions": ".0f",
    "output_tok_s": ".1f",
    "steps": ".0f",
    "held_blocks": ".2f",
    "kept_fraction": ".3f",
    "right": ".0f",
    "usage_left": ".3f",
}
"""Column of a round -> how its median is printed."""
RATIOS = ("mean_running", "most_running", "output_tok_s", "held_blocks")

Row = dict[str, Any]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=PACKAGED_MODEL, help="a folder")
    add("--gates", type=Path, default=GATES, help="write gates of the model")
    add("--recent", type=int, default=32, help="tokens: the gates' window")
    add("--interval", type=int, default=64, help="tokens between events")
    add("--tasks", nargs="+", default=TASKS, help="see docs/accuracy.md")
    add("--problems", type=int, default=4, help="of each task, in each round")
    add("--blocks", type=int, default=50, help="KV blocks of each server")
    add("--block-size", type=int, default=32, help="tokens")
    add("--max-tokens", type=int, default=600, help="of an answer")
    add("--max-model-len", type=int, default=1024, help="tokens")
    add("--pairs", type=int, default=3, help="rounds on both servers")
    add("--seed", type=int, default=0, help="of the first problem")
    add("--out", type=new_file, help="JSON file to write")
    add("--logs", type=new_folder, help="folder for the servers' logs")
    return parser.parse_args(argv)


def servers_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return server name -> arguments of `vllm serve`, the policy first."""
    usable = args.blocks - NULL_BLOCKS
    needed = -(-args.max_model_len // args.block_size)
    if usable < needed:
        raise ValueError(
            f"blocks: got {args.blocks}, expected at least {needed + NULL_BLOCKS} for "
            f"one request of {args.max_model_len} tokens"
        )
    common = EngineSettings(
        model=str(args.model),
        max_model_len=args.max_model_len,
        max_num_seqs=args.problems * len(args.tasks),
        kv_cache_bytes=args.blocks * block_bytes(args.model, args.block_size),
        block_size=args.block_size,
        blocks=args.blocks,
    ).arguments()
    common += ["--no-enable-prefix-caching"]
    options = json.dumps({"wgkv_gates": str(args.gates)})
    policy = ["--kv-policy", POLICY, "--kv-recent", str(args.recent)]
    policy += ["--kv-interval", str(args.interval), "--kv-policy-config", options]
    return {
        POLICY: [*common, *policy],
        STOCK: [*common, "--scheduler-cls", COUNTING_CLASSES[False]],
    }


def asked_of(args: argparse.Namespace, number: int) -> list[Asked]:
    """Return the requests of a round; no two rounds share a problem."""
    last = (number + 1) * args.problems
    by_task = [questions_of(task, last, args.seed, Path()) for task in args.tasks]
    # The tasks take turns, so that short and long answers start together.
    return [
        Asked({"task": question.task, "id": question.id}, question, 0, None)
        for group in zip(*(some[-args.problems :] for some in by_task), strict=True)
        for question in group
    ]


def measure(server: Server, asked: Sequence[Asked], max_tokens: int) -> Row:
    """Send a round's requests at once and return its columns.

    Raises:
        LoadError: a request failed, or blocks stay in use.
    """
    client = Client(concurrency=len(asked), tries=1, max_tokens=max_tokens)
    lines: list[Row] = []
    before, began = server.metrics(), time.perf_counter()
    work = client.ask_all(server.url, asked, lines.append)
    failures, samples = asyncio.run(sampled(work, server.metrics))
    seconds = time.perf_counter() - began
    if failures:
        raise LoadError(f"{server.name}: {failures[0]}")
    after = settled(server)
    return figures(lines, seconds, [before, *samples, after])


def settled(server: Server) -> dict[str, float]:
    """Wait until a server holds no blocks, and return its metrics.

    Blocks that it still holds after SETTLE_SECONDS are a leak and show in the metrics.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        after = server.metrics()
        is_idle = not (after[RUNNING] or after[WAITING] or after[USAGE])
        if is_idle or time.monotonic() > deadline:
            return after
        time.sleep(0.1)


def figures(
    lines: Sequence[Row], seconds: float, samples: Sequence[Mapping[str, float]]
) -> Row:
    """Return the columns of a round.

    Args:
        seconds: from the first request to the last answer.
        samples: /metrics in order: before, during and after the round.

    Returns:
        `mean_running`: requests in a step, mean over the steps between the first and
        the last sample in which a request waits, None with less than two of them;
        `most_running`: as sampled; `preemptions`, `steps`; `output_tok_s`;
        `held_blocks`: of a running request, mean over steps and requests;
        `kept_fraction`: of the tokens that left the window, None without events;
        `right`: answers; `output_tokens`, `seconds`; `usage_left`: share of the pool
        that is held at the end.
    """
    first, last = samples[0], samples[-1]

    def growth(name: str, since: Mapping, until: Mapping) -> float:
        return until.get(name, 0.0) - since.get(name, 0.0)

    def per(part: str, whole: str, since: Mapping, until: Mapping) -> float | None:
        count = growth(f"kvpolicy_{whole}_total", since, until)
        return growth(f"kvpolicy_{part}_total", since, until) / count if count else None

    pressed = [sample for sample in samples if sample[WAITING]]
    span = (pressed[0], pressed[-1]) if pressed else (first, first)
    dropped = per("tokens_dropped", "tokens_left", first, last)
    tokens = sum(line["output_tokens"] for line in lines)
    return {
        "mean_running": per("request_steps", "steps", *span),
        "most_running": max(sample[RUNNING] for sample in samples),
        "preemptions": growth(PREEMPTIONS, first, last),
        "steps": growth("kvpolicy_steps_total", first, last),
        "output_tok_s": tokens / seconds,
        "held_blocks": per("block_steps", "request_steps", first, last),
        "kept_fraction": None if dropped is None else 1 - dropped,
        "right": sum(line["correct"] for line in lines),
        "output_tokens": tokens,
        "seconds": seconds,
        "usage_left": last[USAGE],
    }


def run(args: argparse.Namespace, log_folder: Path) -> Iterator[dict[str, Any]]:
    """Start the servers and ask in turn; yield a JSON-able record after each pair."""
    record: dict[str, Any] = {"provenance": provenance.collect("benchmarks.admission")}
    record["settings"] = vars(args) | {
        key: provenance.redacted(str(getattr(args, key)))
        for key in ("model", "gates", "out", "logs")
    }
    arguments = servers_of(args)
    rows: dict[str, list[Row]] = {name: [] for name in arguments}
    log(f"starting {', '.join(arguments)}; logs in {log_folder}")
    with running(arguments, log_folder) as servers:
        warm_up = asked_of(args, args.pairs)[:1]
        for server in servers.values():
            measure(server, warm_up, WARM_UP_TOKENS)
        for number in range(args.pairs):
            asked = asked_of(args, number)
            for name in list(servers)[:: 1 if number % 2 else -1]:
                row = measure(servers[name], asked, args.max_tokens)
                rows[name].append(row)
                log(f"pair {number + 1}/{args.pairs}: {name} {row}")
            yield record | {"rounds": rows}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison and write its record."""
    args = parse_args(argv)
    folder = args.logs or Path(tempfile.mkdtemp(prefix="kvpolicy-admission-"))
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {}
    for record in run(args, folder):
        if args.out:
            text = json.dumps(record, indent=2) + "\n"
            args.out.write_text(text, encoding="utf-8")
    rows = record["rounds"]
    every = [row for some in rows.values() for row in some]
    known = [name for name in RATIOS if all(row[name] is not None for row in every)]
    ratios = ratios_to(rows, [(POLICY, STOCK)], known, args.seed)
    medians = {name: summarise(some) for name, some in rows.items()}
    print(report(medians, ratios, COLUMNS))


if __name__ == "__main__":
    try:
        main()
    except (LoadError, ValueError) as error:
        sys.exit(f"benchmarks.admission: {error}")
