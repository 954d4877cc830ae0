"""Runs the rounds of a serving comparison on its servers and computes their figures."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from benchmarks import provenance
from benchmarks.columns import COUNTERS, SERVER_MEANS_MS
from benchmarks.load import Completion
from benchmarks.printing import log
from benchmarks.server import Server
from benchmarks.shared_prompts import Requests
from benchmarks.stats import (
    MILLISECONDS,
    Ratio,
    first_token_latencies,
    latencies,
    median_ratio,
)

WARM_UP_ROUND = 0
RUNNING = "vllm:num_requests_running"
SETTLE_SECONDS = 30.0

Row = dict[str, Any]
"""Column -> number, or None where a server has no such figure."""


def measure(server: Server, workload: Requests, round_number: int) -> Row:
    """Run one round on one server.

    Returns:
        See `figures`.
    """
    before = server.metrics()
    completions, samples = asyncio.run(
        workload.play(server.url, round_number, server.metrics)
    )
    after = _settled_metrics(server, before, len(completions))
    return figures(completions, samples, before, after)


def figures(
    completions: Sequence[Completion],
    samples: Sequence[Mapping[str, float]],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> Row:
    """Return the columns of one round; None for figures that a server does not have.

    Args:
        samples: /metrics while they ran.
        before: /metrics before the first.
        after: /metrics after the last.

    Returns:
        The columns of stats.latencies, stats.first_token_latencies, COUNTERS and
        SERVER_MEANS_MS, `peak_running` and `mean_running`: requests in a step
        and `peak_kv_usage`: share of the pool, all as sampled; `hit_ratio`: share of
        the prompts' tokens that came from the prefix cache; `accepted_ratio`: share of
        the drafts that were right; `kept_ratio`: tokens kept /
        tokens held before, over all events; `least_held_ratio`: smallest sampled
        tokens held / tokens computed.
    """

    def growth(series: str) -> Any:
        return after[series] - before.get(series, 0.0) if series in after else None

    row: Row = latencies(completions) | first_token_latencies(completions)
    row |= {column: growth(series) for column, series in COUNTERS.items()}
    for column, series in SERVER_MEANS_MS.items():
        total, count = growth(f"{series}_sum"), growth(f"{series}_count")
        row[column] = MILLISECONDS * total / count if count else None
    kept, dropped = row["tokens_kept"], row["tokens_dropped"]
    row["kept_ratio"] = kept / (kept + dropped) if kept else None
    hit, queried = row["hit_tokens"], row["queried_tokens"]
    row["hit_ratio"] = hit / queried if queried else None
    drafted = row["drafted"]
    row["accepted_ratio"] = row["accepted"] / drafted if drafted else None
    sampled = {
        "peak_running": (max, RUNNING),
        "mean_running": (fmean, RUNNING),
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
    servers: Mapping[str, Server],
    workload: Any,
    pairs: int,
    play: Callable[[Server, Any, int], Row] = measure,
) -> dict[str, list[Row]]:
    """Warm up, then time the servers in turn.

    Args:
        play: plays a round of the workload on a server.

    Returns:
        Server name -> one row per pair.
    """
    names = list(servers)
    rows: dict[str, list[Row]] = {name: [] for name in names}
    for number in range(pairs + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            row = play(servers[name], workload, number)
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
    comparisons: Sequence[tuple[str, str]],
    columns: Sequence[str],
    seed: int,
) -> dict[str, dict[str, Ratio]]:
    """Return `policy / baseline` -> column -> ratio.

    Args:
        rows: server -> one row per pair.
    """
    return {
        f"{policy} / {baseline}": {
            column: median_ratio(
                [row[column] for row in rows[policy]],
                [row[column] for row in rows[baseline]],
                seed,
            )
            for column in columns
        }
        for policy, baseline in comparisons
    }


def recorded(
    arguments: Mapping[str, Sequence[str]],
    pools: Mapping[str, Row],
    rows: Mapping[str, Sequence[Row]],
    ratios: Mapping[str, Mapping[str, Ratio]],
) -> dict[str, Any]:
    """Return what a record says of the servers, and of their ratios.

    Args:
        arguments: server -> those of `vllm serve`.
        pools: server -> see `Server.pool`.
        rows: server -> one row per pair.
        ratios: see `ratios_to`.
    """
    return {
        "servers": {
            name: {
                "arguments": [*map(provenance.redacted, arguments[name])],
                **pools[name],
                "median": summarise(some),
                "rounds": some,
            }
            for name, some in rows.items()
        },
        "ratios": {
            name: {column: asdict(ratio) for column, ratio in row.items()}
            for name, row in ratios.items()
        },
    }
