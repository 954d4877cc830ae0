"""Compares the speed of policies and stock vLLM through the OpenAI API.

    python -m benchmarks.serving pressure --out pressure.json
    python -m benchmarks.serving neutral --pairs 15 --out neutral.json

All servers of a comparison run from start to end and get the same requests in turn
(A B C, B C A, C A B), so a ratio compares neighbours in time and no server always comes
first. They are verified, warmed up with one round that does not count, and then timed.
Timings are meaningful only on an otherwise idle machine.
"""

import argparse
import asyncio
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import provenance
from benchmarks.load import Completion, run_together
from benchmarks.scenarios import AMPLE, SCENARIOS, Scenario
from benchmarks.server import Server, running
from benchmarks.stats import MILLISECONDS, Ratio, latencies, median_ratio
from benchmarks.verify import verify
from benchmarks.workload import Workload

PACKAGED_MODEL = Path("reasoner/checkpoint")
WARM_UP_ROUND = 0
RUNNING = "vllm:num_requests_running"
SETTLE_SECONDS = 30.0
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "steps": "vllm:iteration_tokens_total_count",
    "events": "kvpolicy_events_total",
    "blocks_returned": "kvpolicy_blocks_returned_total",
    "tokens_kept": "kvpolicy_tokens_kept_total",
    "tokens_dropped": "kvpolicy_tokens_dropped_total",
    "event_seconds": "kvpolicy_event_seconds_total",
}
"""Column -> series whose growth in a round it shows."""
SERVER_MEANS_MS = {
    "server_ttft_ms": "vllm:time_to_first_token_seconds",
    "server_itl_ms": "vllm:inter_token_latency_seconds",
}
"""Column -> histogram whose mean over a round it shows, in milliseconds."""
RATIO_COLUMNS = ("output_tok_s", "steps", "ttft_ms", "tpot_ms", "itl_p99_ms")
TABLE_COLUMNS = {
    "output_tok_s": ".1f",
    "ttft_ms": ".1f",
    "tpot_ms": ".2f",
    "itl_p50_ms": ".2f",
    "itl_p99_ms": ".2f",
    "server_itl_ms": ".2f",
    "peak_running": ".0f",
    "preemptions": ".0f",
    "steps": ".0f",
    "events": ".0f",
    "blocks_returned": ".0f",
    "kept_ratio": ".3f",
    "peak_kv_usage": ".2f",
}
"""Column -> how its median over the rounds is printed."""

Row = dict[str, Any]
"""Column -> number, or None where a server has no such figure."""


def measure(server: Server, workload: Workload, round_number: int) -> Row:
    """Run one round on one server.

    Args:
        server: healthy and idle.
        workload: the requests.
        round_number: seeds the contents of the prompts.

    Returns:
        See `figures`.
    """
    prompts = workload.prompts(round_number)
    before = server.metrics()
    completions, samples = asyncio.run(
        run_together(server.url, prompts, workload.output_tokens, server.metrics)
    )
    after = _settled_metrics(server, before, len(prompts))
    return figures(completions, samples, before, after)


def figures(
    completions: Sequence[Completion],
    samples: Sequence[Mapping[str, float]],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> Row:
    """Return the columns of one round; None for figures that a server does not have.

    Args:
        completions: all requests of the round.
        samples: /metrics while they ran.
        before: /metrics before the first.
        after: /metrics after the last.

    Returns:
        The columns of stats.latencies, COUNTERS and SERVER_MEANS_MS, and
        `peak_running`: most requests in a step and `peak_kv_usage`: share of the pool,
        both as sampled; `kept_ratio`: tokens kept / tokens held before, over all
        events; `least_held_ratio`: smallest sampled tokens held / tokens computed.
    """

    def growth(series: str) -> Any:
        return after[series] - before.get(series, 0.0) if series in after else None

    row: Row = dict(latencies(completions))
    row |= {column: growth(series) for column, series in COUNTERS.items()}
    for column, series in SERVER_MEANS_MS.items():
        total, count = growth(f"{series}_sum"), growth(f"{series}_count")
        row[column] = MILLISECONDS * total / count if count else None
    kept, dropped = row["tokens_kept"], row["tokens_dropped"]
    row["kept_ratio"] = kept / (kept + dropped) if kept else None
    sampled = {
        "peak_running": (max, RUNNING),
        "peak_kv_usage": (max, "vllm:kv_cache_usage_perc"),
        "least_held_ratio": (min, "kvpolicy_keep_ratio"),
    }
    # /metrics and tokens come from one event loop; where it lags, gauges do too.
    current = [sample for sample in samples if sample.get(RUNNING)]
    for column, (choose, series) in sampled.items():
        values = [sample[series] for sample in current if series in sample]
        row[column] = choose(values) if values else None
    return row


def _settled_metrics(
    server: Server, before: Mapping[str, float], requests: int
) -> dict[str, float]:
    """Return the metrics once they count all requests of the round as finished."""
    finished = "vllm:request_success_total"
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        after = server.metrics()
        if after[finished] - before.get(finished, 0.0) >= requests:
            return after
        if time.monotonic() > deadline:
            raise TimeoutError(f"{server.name}: {finished} does not count all requests")
        time.sleep(0.05)


def compare(
    servers: Mapping[str, Server], workload: Workload, pairs: int
) -> dict[str, list[Row]]:
    """Warm up, then time the servers in turn.

    Returns:
        Server name -> one row per pair.
    """
    names = list(servers)
    rows: dict[str, list[Row]] = {name: [] for name in names}
    for number in range(pairs + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            row = measure(servers[name], workload, number)
            timed = number != WARM_UP_ROUND
            log(
                f"{f'pair {number}/{pairs}' if timed else 'warm-up'}: {name} "
                f"{row['output_tok_s']:.1f} tok/s, {row['steps']:.0f} steps, "
                f"{row['preemptions']:.0f} preemptions"
            )
            if timed:
                rows[name].append(row)
    return rows


def summarise(rows: Sequence[Row]) -> Row:
    """Return the median of each column over the rounds that have it."""
    summary: Row = {}
    for column in rows[0]:
        values = [row[column] for row in rows if row[column] is not None]
        summary[column] = median(values) if values else None
    return summary


def ratios_to(
    rows: Mapping[str, Sequence[Row]],
    policies: Sequence[str],
    baselines: Sequence[str],
    seed: int,
) -> dict[str, dict[str, Ratio]]:
    """Return `policy / baseline` -> column -> ratio, for all baselines."""
    return {
        f"{policy} / {baseline}": {
            column: median_ratio(
                [row[column] for row in rows[policy]],
                [row[column] for row in rows[baseline]],
                seed,
            )
            for column in RATIO_COLUMNS
        }
        for policy in policies
        for baseline in baselines
        if policy != baseline
    }


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table with aligned columns."""
    rows = [list(header), *map(list, lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows
    )


def report(
    summaries: Mapping[str, Row], ratios: Mapping[str, Mapping[str, Ratio]]
) -> str:
    """Return the tables that a run prints."""
    servers = [
        [name, *(_cell(row[column], form) for column, form in TABLE_COLUMNS.items())]
        for name, row in summaries.items()
    ]
    compared = [
        [name, *(f"{r.median:.3f} [{r.low:.3f}, {r.high:.3f}]" for r in row.values())]
        for name, row in ratios.items()
    ]
    return "\n\n".join(
        [
            "Medians over the rounds",
            table(["server", *TABLE_COLUMNS], servers),
            "Paired ratios: median [95 % bootstrap interval of the median]",
            table(["ratio", *RATIO_COLUMNS], compared),
        ]
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def run(scenario: Scenario, model: Path, log_folder: Path) -> dict[str, Any]:
    """Start the servers, verify them, time them.

    Args:
        scenario: what to compare.
        model: folder of the model.
        log_folder: folder for the servers' logs.

    Returns:
        A JSON-able record of everything.
    """
    record: dict[str, Any] = {"provenance": provenance.collect("benchmarks.serving")}
    workload = scenario.workload(model)
    arguments = scenario.servers(model, workload)
    extra = {AMPLE: scenario.ample_server(model, workload)}
    log(f"starting {', '.join(arguments)}; logs in {log_folder}")
    with running(
        arguments | extra if scenario.is_pressed else arguments, log_folder
    ) as servers:
        passed = verify(scenario, workload, servers)
        for sentence in passed:
            log(f"verified: {sentence}")
        if scenario.is_pressed:
            servers.pop(AMPLE).stop()
        caches = {name: server.cache_info() for name, server in servers.items()}
        rows = compare(servers, workload, scenario.pairs)
    summaries = {name: summarise(of_server) for name, of_server in rows.items()}
    ratios = ratios_to(rows, scenario.policies, scenario.baselines, scenario.seed)
    print(report(summaries, ratios))
    return record | {
        "scenario": asdict(scenario),
        "prompt_tokens": workload.prompt_tokens,
        "verified": passed,
        "servers": {
            name: {
                "arguments": words,
                "blocks": int(caches[name]["num_gpu_blocks"]),
                "block_size": int(caches[name]["block_size"]),
                "median": summaries[name],
                "rounds": rows[name],
            }
            for name, words in arguments.items()
        },
        "ratios": {
            name: {column: asdict(ratio) for column, ratio in row.items()}
            for name, row in ratios.items()
        },
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--model", type=Path, default=PACKAGED_MODEL, help="a folder")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--policies", nargs="+", metavar="NAME")
    for name, what in (
        ("pairs", "timed rounds"),
        ("requests", "sent at once"),
        ("output_tokens", "forced length of each output"),
        ("budget", "tokens per KV head"),
        ("interval", "tokens between events"),
        ("block_size", "tokens"),
        ("max_model_len", "tokens"),
        ("seed", "of lengths and contents"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=what)
    parser.add_argument(
        "--count-windows",
        action="store_true",
        help="subtract the memory of query windows from the policies' pools",
    )
    return parser.parse_args(argv)


def choose_scenario(args: argparse.Namespace) -> Scenario:
    """Return the scenario with the changes of the command line."""
    scenario = SCENARIOS[args.scenario]
    changes = {
        name: value
        for name, value in vars(args).items()
        if name in asdict(scenario) and value is not None
    }
    if args.policies:
        changes["policies"] = tuple(args.policies)
    return replace(scenario, name=args.scenario, **changes)


def find_model(asked: Path, folder: Path) -> Path:
    """Return the model's folder; a random tiny model if the packaged one is missing.

    Args:
        asked: folder named on the command line.
        folder: where a tiny model may be written.
    """
    if asked != PACKAGED_MODEL or (asked / "config.json").is_file():
        return asked
    log("no packaged model: using a random tiny one")
    script = provenance.ROOT / "tests" / "tiny_model.py"
    return runpy.run_path(str(script))["make_tiny_model"](folder / "tiny_model")


def log(sentence: str) -> None:
    """Print progress to standard error."""
    print(sentence, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run one scenario and write its record."""
    args = parse_args(argv)
    folder = args.logs or Path(tempfile.mkdtemp(prefix="kvpolicy-serving-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = find_model(args.model, folder)
    record = run(choose_scenario(args), model, folder)
    if args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")
        log(f"wrote {args.out}")


if __name__ == "__main__":
    main()
