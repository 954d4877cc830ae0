"""Runs the same requests on one rank and on two, and compares what they give."""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from support.calibration_files import options_for
from support.engine.helpers import (
    Engine,
    Job,
    Record,
    Run,
    make_prompt,
    one_job_each,
    serve,
)
from support.made_adapters import make_adapter
from support.made_patterns import write_pattern
from support.made_surrogates import write_surrogate
from support.tiny_model import make_tiny_model
from vllm_kvpolicy.config_keys import ALWAYS

LAYERS, HIDDEN, SIZE, WINDOW, SINKS = 2, 64, 32, 32, 4
POLICY = {"budget": 112, "interval": 64, "prefill_interval": 192}
POLICY |= {"recent": WINDOW, "sinks": SINKS}
WINDOWS = {"expected_window": 48, "snapmax_window": 48}  # no longer than the interval
LENGTHS = (60, 150, 280, 340)
MAX_TOKENS = 130


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int


def write_model(folder: Path, heads: Heads) -> Path:
    return make_tiny_model(folder, LAYERS, HIDDEN, heads.query, heads.kv, SIZE)


def options_with_files(
    names: Iterable[str], folder: Path, heads: Heads
) -> dict[str, Any]:
    """Return the options that policies need, files for all heads among them."""
    group = heads.query // heads.kv
    found: dict[str, Any] = {}
    for name in names:
        found |= options_for(name, folder, LAYERS, heads.kv, group, SIZE)
        kind = name.partition("+")[0]
        if kind == "dms":
            adapter = make_adapter(LAYERS, heads.kv, HIDDEN, window=WINDOW)
            adapter.save(folder / "adapter.safetensors")
            found["dms_adapter"] = str(folder / "adapter.safetensors")
        elif kind == "kvzap":
            surrogate = folder / "surrogate"
            write_surrogate(surrogate, LAYERS, heads.kv, HIDDEN, units=16)
            found |= {"kvzap_model": str(surrogate), "kvzap_threshold": -4.0}
        elif kind == "duo":
            use = np.linspace(0.1, 0.9, LAYERS * heads.kv).reshape(LAYERS, -1)
            pattern = write_pattern(folder / "pattern", use, SINKS, WINDOW)
            found["duo_pattern"] = str(pattern)
    return found


@dataclass
class Comparison:
    """What differs between two runs of the same requests.

    Args:
        events: that were compared, before the first difference of each request.
        kept: requests whose survivors differ, with the event.
        said: requests whose tokens differ.
    """

    events: int = 0
    kept: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def run_on(
    ranks: int,
    model: Path,
    names: Sequence[str],
    options: dict[str, Any],
    folder: Path,
    num_blocks: int = 120,
    foresees: bool = False,
    events: str = ALWAYS,
    answer: int = MAX_TOKENS,
    **changes: Any,
) -> Run:
    """Serve a request for each name; return what they gave."""
    values = {**POLICY, "policy": names[0], "allow": list(names[1:])}
    values |= {"policy_config": options, "events": events}
    jobs = [
        replace(job, arrives=index)
        for index, job in enumerate(one_job_each(names, LENGTHS, answer, 0))
    ]
    changes = {"max_num_batched_tokens": 160, "max_model_len": 512, **changes}
    changes |= {"tensor_parallel_size": ranks, "foresees": foresees}
    return serve(model, values, jobs, folder / f"trace-{ranks}", num_blocks, **changes)


def compare(one: Run, two: Run) -> Comparison:
    """Compare two runs of the same requests, each up to its first difference."""
    found = Comparison()
    for name, expected in one.results.items():
        got = two.results[name]
        if expected.tokens != got.tokens:
            found.said.append(name)
        pairs = zip(expected.events, got.events, strict=False)
        for before, after in pairs:
            found.events += 1
            if not same_survivors(before, after):
                found.kept.append(f"{name} event {before.ordinal}")
                break
        else:
            assert len(expected.events) == len(got.events)
    return found


def same_survivors(one: Record, other: Record) -> bool:
    """Return whether two runs chose the same tokens in every head at an event."""
    if one.position != other.position or one.held.shape[:2] != other.held.shape[:2]:
        return False
    heads = [(layer, head) for layer, head in np.ndindex(*one.held.shape[:2])]
    return all(
        np.array_equal(one.survivors_of(*place), other.survivors_of(*place))
        and np.array_equal(one.selected_of(*place), other.selected_of(*place))
        for place in heads
    )


def watch_events(worker: Any) -> None:
    """Let a worker fold its events, and what they leave, into one number."""
    requests, tier = worker.kv_policy_runtime.requests, worker.kv_policy_runtime.tier
    worker.events_seen, worker.events_digest = 0, hashlib.sha256()
    update = requests.update

    def noted(rows: Sequence[int], events: Sequence[Any], *args: Any) -> Any:
        worker.events_seen += len(events)
        worker.events_digest.update(repr(events).encode())
        if hasattr(tier, "lists"):
            pages = tier.lists.counts(rows).tolist()
            worker.events_digest.update(repr(pages).encode())
        return update(rows, events, *args)

    requests.update = noted


def break_events(worker: Any) -> None:
    """Let the next event of the second rank fail."""
    requests = worker.kv_policy_runtime.requests

    def fails(*args: Any) -> None:
        raise RuntimeError("no memory")

    if worker.rank:
        requests.update = fails


def check_ranks(engine: Engine) -> None:
    """Check that ranks have seen the same events, and have forgotten all requests."""
    first, *others = engine.core.model_executor.collective_rpc(fingerprint)
    assert all(other == first for other in others) and not first[2], "ranks part"
    assert first[0] == engine.counters()["events"]


def fingerprint(worker: Any) -> tuple[int, str, int]:
    """Return events seen, their digest, and requests that the worker still has."""
    runtime = worker.kv_policy_runtime
    return worker.events_seen, worker.events_digest.hexdigest(), len(runtime.requests)


def storm(seed: int, count: int, names: Sequence[str]) -> list[Job]:
    """Return requests of random lengths, some of them aborted, all in one crowd."""
    rng = random.Random(seed)
    return [
        Job(
            f"{seed}-{index}",
            make_prompt(seed * 10_000 + index, rng.randint(20, 300)),
            rng.randint(40, MAX_TOKENS),
            arrives=rng.randint(0, 3 * count),
            aborted=rng.choice((None, None, None, rng.randint(1, 40))),
            extra_args={"kv_policy": rng.choice(names)},
        )
        for index in range(count)
    ]
