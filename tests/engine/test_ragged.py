"""Heads of different lengths: neighbours, sizes that follow the text, separate layers.

The oracles cover selection and replay of every ragged policy; these are the cases that
need engines of their own.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from support.engine.helpers import Engine, Job, Run, make_jobs
from support.engine.oracle_replay import check_replay
from support.engine.reference_decoder import ReferenceDecoder
from support.sweeps import some
from vllm_kvpolicy.worker import pages

VALUES = {"budget": 128, "interval": 56, "prefill_interval": 256}
RAGGED = {"policy": "adakv-snapkv", **VALUES}
DYNAMIC = {
    "policy": "hard-snapkv",
    **VALUES,
    "policy_config": {"hard_mode": "dynamic", "hard_p": 0.5, "hard_lower": 0.1},
}
FIXED = {**DYNAMIC, "policy_config": {"hard_p": 0.5, "hard_lower": 0.1}}


def jobs(seed: int = 9) -> list[Job]:
    return make_jobs((40, 90, 300, 600, 150, 410), 240, seed=seed)


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> ReferenceDecoder:
    return ReferenceDecoder(tiny_model)


@pytest.mark.parametrize("policy", some(["adakv-snapkv", "hard-tova", "snapkv"]))
def test_a_full_cache_among_evicting_neighbours_is_stock(
    tiny_model: Path, policy: str
) -> None:
    whole = {"kv_policy": "none"}
    mixed = [
        replace(job, extra_args=whole) if number % 2 else job
        for number, job in enumerate(jobs())
    ]
    with Engine(tiny_model) as engine:
        stock = engine.run(jobs())
    with Engine(tiny_model, {"policy": policy, **VALUES}) as engine:
        run = engine.run(mixed)
        assert engine.counters()["tokens_dropped"] > 0
        assert engine.num_free == engine.num_usable
    for job in mixed:
        same = run.tokens[job.name] == stock.tokens[job.name]
        assert same == (job.extra_args == whole), job.name


def held_blocks(run: Run, heads: int = 4) -> int:
    """Return superblocks of survivors, summed over all events."""
    events = [event for result in run.results.values() for event in result.events]
    pages = [int((event.survivors >= 0).sum()) // 32 for event in events]
    return sum(-(-count // heads) for count in pages)


def test_sizes_that_follow_the_text_give_more_back(
    tiny_model: Path, tmp_path: Path, decoder: ReferenceDecoder
) -> None:
    """Workers answer how many superblocks survivors take; the surplus is trimmed."""
    runs = {}
    for name, values in {"fixed": FIXED, "dynamic": DYNAMIC}.items():
        with Engine(tiny_model, values, tmp_path / name) as engine:
            least_free = engine.num_usable
            counts = []

            def watch(engine: Engine, counts: list[int] = counts) -> None:
                counts.append(engine.num_free)

            runs[name] = engine.run(jobs(), watch)
            assert engine.num_free == engine.num_usable
            assert min(counts) < least_free
            runs[name + " free"] = sum(counts) / len(counts)
            counted = engine.counters()
        assert counted["tokens_dropped"] == 32 * counted["blocks_returned"] > 0
    assert held_blocks(runs["dynamic"]) < 0.8 * held_blocks(runs["fixed"])
    assert runs["dynamic free"] > runs["fixed free"]
    for result in runs["dynamic"].results.values():
        check_replay(decoder, result)


def test_answers_hold_under_preemption(
    tiny_model: Path, tmp_path: Path, decoder: ReferenceDecoder
) -> None:
    pool = {"num_blocks": 29, "max_model_len": 896, "max_num_batched_tokens": 96}
    pool |= {"foresees": False}
    with Engine(tiny_model, DYNAMIC, tmp_path, **pool) as engine:
        run = engine.run(jobs())
        assert engine.num_free == engine.num_usable
    assert run.preemptions > 0
    for result in run.results.values():
        check_replay(decoder, result)


@pytest.mark.parametrize("policy", some(["hard-snapkv", "identity", "adakv-snapkv"]))
def test_layers_in_allocations_of_their_own(
    tiny_model: Path,
    tmp_path: Path,
    decoder: ReferenceDecoder,
    policy: str,
    monkeypatch,
) -> None:
    """Pages then change heads but not layers, which share out their own parts."""
    monkeypatch.setattr(pages, "_one_allocation", lambda caches: None)
    values = {"policy": policy, **VALUES}
    if policy == "identity":
        values["policy_config"] = {"ragged": True}
    with Engine(tiny_model) as engine:
        stock = engine.run(jobs())
    with Engine(tiny_model, values, tmp_path) as engine:
        assert not engine.runtime.compactor.pool.spans_layers
        run = engine.run(jobs())
    if policy == "identity":
        assert run.tokens == stock.tokens
    for result in run.results.values():
        check_replay(decoder, result)
        for event in result.events:
            per_layer = (event.survivors >= 0).sum((1, 2))
            assert len(set(per_layer.tolist())) == 1


def test_merging_dropped_tokens_changes_answers_and_nothing_else(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Merged survivors are no text any more: replay does not hold, memory does."""
    runs = {}
    for merge in (False, True):
        options = {"hard_p": 0.5, "hard_merge": merge}
        values = {**FIXED, "policy_config": options}
        with Engine(tiny_model, values, tmp_path / str(merge)) as engine:
            runs[merge] = engine.run(jobs())
            assert engine.num_free == engine.num_usable
    plain, merged = runs[False], runs[True]
    assert plain.tokens != merged.tokens
    first = [(plain.results[name], merged.results[name]) for name in plain.results]
    for without, with_merge in first:
        ours, theirs = with_merge.events[0], without.events[0]
        assert ours.survivors.tolist() == theirs.survivors.tolist()
        length = ours.position + 1 - len(without.job.prompt)
        if length > 0:
            assert with_merge.tokens[:length] == without.tokens[:length]


def test_an_event_that_wants_nothing_keeps_a_page(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Without sinks, and with events closer together than a superblock is long."""
    options = {"window": 8, "hard_p": 0.01, "hard_mode": "dynamic"}
    values = {**VALUES, "policy": "hard-snapkv", "policy_config": options}
    extra = {"kv_sinks": 0, "kv_interval": 8}
    asked = [replace(job, extra_args=extra) for job in jobs()]
    with Engine(tiny_model, values, tmp_path) as engine:
        run = engine.run(asked)
        assert engine.num_free == engine.num_usable
    assert sum(len(result.events) for result in run.results.values()) > 20
