"""Heads of different lengths: neighbours, sizes that follow the text, separate layers.

The oracles cover selection and replay of every ragged policy; these are the cases that
need engines of their own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.engine import helpers
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
    return make_jobs((40, 90, 300, 150, 410), 150, seed=seed)


@pytest.fixture(scope="module")
def stock(tiny_model: Path) -> Run:
    return helpers.serve(tiny_model, None, jobs())


@pytest.fixture(scope="module")
def fixed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    return serve(tiny_model, FIXED, tmp_path_factory.mktemp("fixed"))


def serve(model: Path, values: dict[str, Any], trace: Path) -> tuple[Run, float]:
    """Return a run and the mean of free blocks."""
    with Engine(model, values, trace) as engine:
        counts: list[int] = []
        run = engine.run(jobs(), lambda engine: counts.append(engine.num_free))
        assert engine.num_free > min(counts)
        return run, sum(counts) / len(counts)


@pytest.mark.parametrize("policy", ["snapkv", *some(["adakv-snapkv", "hard-tova"])])
def test_a_full_cache_among_evicting_neighbours_is_stock(
    tiny_model: Path, stock: Run, policy: str
) -> None:
    whole = {"kv_policy": "none"}
    mixed = [
        replace(job, extra_args=whole) if number % 2 else job
        for number, job in enumerate(jobs())
    ]
    run = helpers.serve(tiny_model, {"policy": policy, **VALUES}, mixed)
    assert run.counters["tokens_dropped"] > 0
    for job in mixed:
        same = run.tokens[job.name] == stock.tokens[job.name]
        assert same == (job.extra_args == whole), job.name


def held_blocks(run: Run, heads: int = 4) -> int:
    """Return superblocks of survivors, summed over all events."""
    pages = [int((event.survivors >= 0).sum()) // 32 for event in run.events]
    return sum(-(-count // heads) for count in pages)


def test_sizes_that_follow_the_text_give_more_back(
    tiny_model: Path, tmp_path: Path, fixed, decoder: ReferenceDecoder
) -> None:
    """Workers answer how many superblocks survivors take; the surplus is trimmed."""
    dynamic = serve(tiny_model, DYNAMIC, tmp_path)
    for run, _ in (fixed, dynamic):
        blocks = run.counters["blocks_returned"]
        assert run.counters["tokens_dropped"] == 32 * blocks > 0
    assert held_blocks(dynamic[0]) < 0.8 * held_blocks(fixed[0])
    assert dynamic[1] > fixed[1]
    for result in dynamic[0].results.values():
        check_replay(decoder, result)


def test_answers_hold_under_preemption(
    tiny_model: Path, tmp_path: Path, decoder: ReferenceDecoder
) -> None:
    pool = {"num_blocks": 19, "max_model_len": 576, "max_num_batched_tokens": 96}
    pool |= {"foresees": False}
    run = helpers.serve(tiny_model, DYNAMIC, jobs(), tmp_path, **pool)
    assert run.preemptions > 0
    for result in run.results.values():
        check_replay(decoder, result)


@pytest.mark.parametrize("policy", some(["hard-snapkv", "identity", "adakv-snapkv"]))
def test_layers_in_allocations_of_their_own(
    tiny_model: Path,
    tmp_path: Path,
    stock: Run,
    decoder: ReferenceDecoder,
    policy: str,
    monkeypatch,
) -> None:
    """Pages then change heads but not layers, which share out their own parts."""
    monkeypatch.setattr(pages, "_one_allocation", lambda caches: None)
    values = {"policy": policy, **VALUES}
    if policy == "identity":
        values["policy_config"] = {"ragged": True}
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
    tiny_model: Path, tmp_path: Path, fixed
) -> None:
    """Merged survivors are no text any more: replay does not hold, memory does."""
    values = {**FIXED, "policy_config": {**FIXED["policy_config"], "hard_merge": True}}
    plain, merged = fixed[0], helpers.serve(tiny_model, values, jobs(), tmp_path)
    assert plain.tokens != merged.tokens
    for name, without in plain.results.items():
        with_merge = merged.results[name]
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
    asked = make_jobs((40, 150, 300), 80, seed=9, extra_args=extra)
    assert len(helpers.serve(tiny_model, values, asked, tmp_path).events) > 20
