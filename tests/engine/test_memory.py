"""Memory really returns: the pool at events and at the end, and what users read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.metrics.stats import SchedulerStats

from support.cpu import needs_float8
from support.engine.helpers import (
    BLOCK,
    Engine,
    Job,
    footprint_of,
    make_jobs,
    make_prompt,
)
from vllm_kvpolicy.worker.compaction import Compactor

VALUES = {"policy": "ams-tova", "budget": 110, "interval": 56, "prefill_interval": 256}

# The newest 32 queries, as long as 64 keys: half of the keys and values of a block.
WINDOW_BLOCKS = 1


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    with Engine(tiny_model, VALUES, folder, max_num_batched_tokens=96) as engine:
        yield engine


def pages(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def held_per_step(engine: Engine, length: int, max_tokens: int):
    """Run one request; return (events so far, blocks held, of them lent for queries,
    usage) per step, and it."""
    seen = []
    events_before = engine.counters()["events"]

    def note(engine: Engine) -> None:
        manager = engine.scheduler.kv_cache_manager
        events = int(engine.counters()["events"] - events_before)
        states = engine.scheduler.kv_policy_planner.states.values()
        lent = sum(len(state.window) for state in states)
        held = engine.num_usable - engine.num_free
        seen.append((events, held, lent, manager.usage))

    run = engine.run(make_jobs((length,), max_tokens, seed=12), note)
    return seen[:-1], run.results["r0"]  # after the last step nothing is held


@pytest.mark.parametrize("length", [40, 600])
def test_blocks_held_are_global_plus_local(engine: Engine, length: int) -> None:
    seen, result = held_per_step(engine, length, 250)
    assert max(events for events, *_ in seen) == len(result.events) >= 2
    assert {lent for _, _, lent, _ in seen} == {0, WINDOW_BLOCKS}
    for events, held, lent, usage in seen:
        end = result.events[events].position if events < len(result.events) else None
        event = result.events[events - 1] if events else None
        num_global = event.survivors.shape[-1] // BLOCK if event else 0
        frontier = event.frontier if event else 0
        position = end if end is not None else len(result.all_tokens) - 1
        assert num_global < held - lent <= num_global + pages(position - frontier)
        assert usage == pytest.approx(held / engine.num_usable)


def test_the_free_count_grows_at_the_event(engine: Engine) -> None:
    """At most one block is taken in a decode step, two or more come back.

    Those that were lent for queries come back as well.
    """
    steps, result = held_per_step(engine, 70, 300)
    seen = [(events, held - lent) for events, held, lent, _ in steps]
    growth = {
        events: held - before
        for (earlier, before), (events, held) in zip(seen, seen[1:], strict=False)
        if events > earlier
    }
    before_events = [
        lent
        for (events, _, lent, _), following in zip(steps, steps[1:], strict=False)
        if following[0] > events
    ]
    assert before_events == [WINDOW_BLOCKS] * len(growth)
    assert len(growth) == len(result.events) >= 4
    assert all(change <= -1 for change in growth.values())
    assert min(growth.values()) <= -2


def test_counters_agree_with_the_trace(engine: Engine) -> None:
    before = engine.counters()
    run = engine.run(make_jobs((90, 200, 310), 200, seed=14))
    after = engine.counters()
    kept = [
        event.survivors.shape[-1] + event.position - event.frontier
        for event in run.events
    ]
    assert after["events"] - before["events"] == len(kept)
    assert after["tokens_kept"] - before["tokens_kept"] == sum(kept)
    dropped = after["tokens_dropped"] - before["tokens_dropped"]
    assert dropped == BLOCK * (after["blocks_returned"] - before["blocks_returned"]) > 0


def test_capacity_uses_the_compressed_footprint(engine: Engine) -> None:
    """What vLLM prints as "maximum concurrency" counts bounded requests."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    scheduler = engine.scheduler
    concurrency = get_max_concurrency_for_kv_cache_config(
        scheduler.vllm_config, scheduler.kv_cache_config
    )
    (group,) = scheduler.kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    bound = spec.max_memory_usage_bytes(scheduler.vllm_config) / spec.page_size_bytes
    longest = scheduler.vllm_config.model_config.max_model_len
    worst = max(
        footprint_of(VALUES, job).most_blocks(longest - 1)
        for job in make_jobs(range(1, longest, 7), 1)
    )
    assert worst <= bound < pages(longest)
    assert concurrency == pytest.approx((engine.num_usable + 1) / bound)


# -- what vLLM derives from a request's list of blocks --------------------------------

STREAMING = {"policy": "streaming", "budget": 64, "interval": 32, "recent": 8} | {
    "prefill_interval": 64,  # the first event of a longer prompt is at 128
}


def numbers_of(model: Path, policy: dict[str, Any] | None, jobs: list[Job]):
    """Run jobs one by one; return by name (hits, tokens cached) as its user reads them,
    and, summed over all that an operator reads, (tokens looked up, hits), most used."""
    told: list[SchedulerStats] = []
    changes = {"enable_prefix_caching": True, "disable_log_stats": False}
    with Engine(model, policy, max_num_batched_tokens=96, **changes) as engine:
        make_stats = engine.scheduler.make_stats

        def noting(*args: Any, **kwargs: Any) -> SchedulerStats:
            told.append(make_stats(*args, **kwargs))
            return told[-1]

        engine.scheduler.make_stats = noting
        read = {}
        for job in jobs:
            output = engine.run([job]).results[job.name].output
            counted = output.num_cached_tokens, output.num_cache_creation_tokens
            read[job.name] = counted
    stats = [each.prefix_cache_stats for each in told]
    looked_up = sum(each.queries for each in stats), sum(each.hits for each in stats)
    assert told[-1].kv_cache_usage == 0
    return read, looked_up, max(each.kv_cache_usage for each in told)


def test_counts_of_the_prefix_cache_are_those_of_stock_up_to_the_first_event(
    tiny_model: Path,
) -> None:
    """Events take cached blocks out of the list from which vLLM counts them.

    What a request computes after its first event is not cached, and no hit reaches that
    event. Otherwise the numbers are those of stock.
    """
    prompt, free = make_prompt(30, 200), {"kv_policy": "none"}
    jobs = [
        Job("short", make_prompt(31, 100), 8),
        Job("prompt", prompt, 40),
        Job("ends early", make_prompt(32, 200), 1),
        Job("long", make_prompt(33, 400), 8),
        Job("second turn", prompt + make_prompt(34, 60), 8),
        Job("no policy", make_prompt(35, 400), 8, extra_args=free),
    ]
    stock, (queries, hits), most = numbers_of(tiny_model, None, jobs)
    assert stock == {
        "short": (0, 96),
        "prompt": (0, 192),
        "ends early": (0, 192),
        "long": (0, 384),
        "second turn": (192, 64),
        "no policy": (0, 384),
    }
    found, looked_up, used = numbers_of(tiny_model, STREAMING, jobs)
    ours = {"prompt": (0, 128), "ends early": (0, 128), "long": (0, 128)}
    assert found == {**stock, **ours, "second turn": (96, 32)}
    length = sum(len(job.prompt) for job in jobs)
    assert ((queries, hits), looked_up) == ((length, 192), (length, 96))
    assert used == most  # by the request without a policy


ALLOWED = {"policy": "ams-tova", "budget": 256, "interval": 64} | {
    "allow": ["rkv", "adakv-snapkv", "quest"]
}


def start(model: Path, mib: float) -> None:
    """Start and stop an engine with so much memory for its KV cache."""
    given = {"kv_cache_memory_bytes": int(mib * 2**20), "num_gpu_blocks_override": None}
    Engine(model, ALLOWED, max_num_seqs=128, **given).close()


def test_a_pool_too_small_says_what_takes_the_memory_and_what_is_enough(
    tiny_model: Path,
) -> None:
    """vLLM's own error would say 0.01 GiB, which is larger than 0.01 GiB."""
    with pytest.raises(ValueError) as refused:
        start(tiny_model, 2)
    text = str(refused.value)
    assert text.startswith("KV cache memory: of 2.0 MiB, --kv-policy takes ")
    assert "page lists of heads" in text and " for adakv-snapkv, quest), and " in text
    assert "values of kept tokens" in text and " for ams-tova" in text
    assert "take policies out of `allow`" in text and "\n" not in text
    enough = float(text.partition("give at least ")[2].partition(" MiB")[0])
    superblock = float(text.partition("superblocks of ")[2].partition(" MiB")[0])
    start(tiny_model, enough)
    with pytest.raises(ValueError, match="^KV cache memory: "):
        start(tiny_model, enough - superblock - 0.1)


def test_the_longest_request_that_fits_is_searched_for(tiny_model: Path) -> None:
    """`--max-model-len auto`, with a budget that 2 MiB do not hold."""
    given = {"kv_cache_memory_bytes": 2**21, "num_gpu_blocks_override": None}
    given |= {"max_model_len": -1, "max_num_seqs": 4}
    with Engine(tiny_model, {"policy": "ams-tova"}, **given) as engine:
        longest = engine.scheduler.max_model_len
        assert BLOCK * 30 < longest == BLOCK * engine.num_usable < 2048
        (result,) = engine.run(make_jobs((longest - 40,), 40)).results.values()
        assert len(result.all_tokens) == longest


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("ams-tova", "auto"),
        ("adakv-snapkv", "auto"),
        # Windows are set to zeros when their events are over, not when they are read.
        pytest.param("ams-tova", "fp8", marks=needs_float8),
    ],
)
def test_events_without_memory_for_all_come_one_after_the_other(
    policy: str, kind: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as they are too many at once, and with the same survivors."""
    values = {**VALUES, "policy": policy, "spread_events": False}
    jobs = make_jobs((40,) * 5, 250, seed=5)  # in step with each other
    place, sizes = Compactor._place, []

    def short(self: Compactor, batch: Any, choice: Any) -> Any:
        sizes.append(len(batch.events))
        if len(found) == 1 and len(batch.events) > 1:  # in the second run
            raise torch.OutOfMemoryError("CUDA out of memory")
        return place(self, batch, choice)

    monkeypatch.setattr(Compactor, "_place", short)
    found = []
    with Engine(tiny_model, values, kv_cache_dtype=kind) as engine:
        engine.runtime.compactor.most_tokens.clear()
        for _ in range(2):
            sizes.clear()
            found.append(engine.run(jobs))
            assert max(sizes) == 5
        # The next batches are smaller from the start.
        assert sizes.count(5) == 1 and sizes.count(1) > 5 and {*sizes} <= {1, 2, 3, 5}
    whole, halves = found
    assert whole.counters["tokens_dropped"] > 0
    for name, result in whole.results.items():
        assert halves.results[name].tokens == result.tokens
