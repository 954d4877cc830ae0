"""MTP and EAGLE: layers that draft are evicted with the model's, and draft as before.

What moves without dropping anything leaves every draft as it is, so that tables and
superblocks of these layers are right in all of their passes.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.engine.async_on_cpu import allow_async_scheduling
from support.engine.helpers import Engine, Run, make_jobs, serve
from support.made_drafters import NUM_LAYERS, make_glm, make_llama
from support.repetition import Drafts, watch_drafts
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE

KINDS = ("mtp", "eagle", "eagle3")
VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256}
EXPECTED = {**VALUES, "policy_config": {"expected_window": 36}}
# Nothing dropped: moved, with equal lengths and with lengths per head; never cut.
STOCK = {
    "identity": VALUES,
    "holes": {**VALUES, "policy_config": {"ragged": True}},
    "ams-expected": {**EXPECTED, "budget": 2048},
    "adakv-h2o": {"events": PRESSURE},
}
# Of heads with lengths of their own, those of drafters take part in sharing pages out.
EVICTIONS = {"ams-tova": VALUES, "ams-expected": EXPECTED, "snapkv": VALUES}
# All engines cut prompts at the same places, where stock's drafters take the prompt's
# last token for the next one.
SIZES = {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 64}
SIZES |= {"max_model_len": 832}
LENGTHS = (40, 150, 300, 600)


@dataclass(frozen=True)
class Served:
    """What requests got.

    Args:
        waiting: by request and number of its tokens, what is drafted behind these.
    """

    run: Run
    drafts: Drafts
    waiting: dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Return what writes a model; and what vLLM is told of its drafter."""

    @cache
    def written(kind: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "mtp":
            return make_glm(folder), {"method": kind, "num_speculative_tokens": 1}
        target, drafter = make_llama(folder, kind)
        more = {"model": str(drafter), "num_speculative_tokens": 3}
        return target, {"method": kind, **more}

    return written


@pytest.fixture(scope="module")
def served(models, tmp_path_factory: pytest.TempPathFactory):
    """Return what serves the same requests once, with drafts or without."""

    @cache
    def run(
        kind: str,
        policy: str | None = None,
        is_drafting: bool = True,
        is_cut: bool = False,
        is_async: bool = False,
    ) -> Served:
        (model, drafter), changes = models(kind), dict(SIZES)
        if is_drafting:
            changes["speculative_config"] = drafter
        values = policy and (EVICTIONS if is_cut else STOCK)[policy]
        values = policy and {"policy": policy, **values}
        trace = tmp_path_factory.mktemp("trace") if policy else None
        waiting: dict[tuple[str, int], list[int]] = {}

        def note(engine: Engine) -> None:
            for request in engine.scheduler.running:
                place = request.request_id.rsplit("-", 1)[0], request.num_tokens
                waiting[place] = list(request.spec_token_ids)

        with pytest.MonkeyPatch.context() as patch:
            if is_async:
                allow_async_scheduling(patch)
                changes["async_scheduling"] = True
            with Engine(model, values, trace, **changes) as engine:
                drafts, jobs = watch_drafts(engine), make_jobs(LENGTHS, 120, seed=5)
                found = engine.run(jobs, note)
                assert (engine.core.batch_queue is not None) == is_async
        return Served(found, drafts, waiting)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_save_steps_and_change_no_token(served, kind: str) -> None:
    """Of stock vLLM: what the other tests compare with."""
    plain, drafting = served(kind, None, False), served(kind)
    assert plain.run.tokens == drafting.run.tokens
    assert drafting.run.steps < 0.95 * plain.run.steps
    assert 0.05 < drafting.drafts.share < 0.95


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", STOCK)
def test_drafts_are_those_of_stock(served, kind: str, policy: str) -> None:
    found, stock = served(kind, policy), served(kind)
    assert found.run.tokens == stock.run.tokens
    if policy in ("identity", "holes"):
        assert found.run.counters["events"] > 8
        both = found.waiting.keys() & stock.waiting.keys()
        assert len(both) > 0.8 * len(stock.waiting)
        # No step goes past an event, nor do its drafts.
        for place in both:
            drafts = found.waiting[place]
            assert drafts == stock.waiting[place][: len(drafts)], place
    else:
        assert not found.run.counters["events"]
        assert found.waiting == stock.waiting
        assert found.drafts.accepted == stock.drafts.accepted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", EVICTIONS)
def test_tokens_and_survivors_are_those_without_drafts(
    served, kind: str, policy: str
) -> None:
    drafting = served(kind, policy, is_cut=True)
    run, plain = drafting.run, served(kind, policy, False, is_cut=True).run
    assert run.tokens == plain.tokens and run.counters["events"] > 8
    layers = NUM_LAYERS["glm" if kind == "mtp" else "llama"]
    for name, result in run.results.items():
        expected = plain.results[name].events
        assert [e.position for e in result.events] == [e.position for e in expected]
        for ours, theirs in zip(result.events, expected, strict=True):
            assert len(ours.survivors) == layers + 1
            assert ours.survivors[:layers].tolist() == theirs.survivors.tolist()
    assert drafting.drafts.share > 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", EVICTIONS)
def test_events_wait_for_verified_drafts(served, kind: str, policy: str) -> None:
    """With asynchronous scheduling, which counts drafts under way as computed."""
    run = served(kind, policy, is_cut=True).run
    served(kind, policy, is_cut=True, is_async=True).run.check_kept(run)
    assert run.counters["events"] > 8


def test_survivors_do_not_depend_on_how_much_is_drafted(models, tmp_path) -> None:
    """Not in layers that draft, either: no window holds queries of drafts."""
    (model, drafter), found = models("eagle"), []
    for count in (1, 3):
        speculating = {**drafter, "num_speculative_tokens": count}
        changes = {**SIZES, "speculative_config": speculating}
        values = {"policy": "snapkv", **VALUES}
        jobs = make_jobs((40, 150, 300), 120, seed=5)
        found.append(serve(model, values, jobs, tmp_path / str(count), **changes))
    assert len(found[0].events) >= 8
    found[0].check_kept(found[1])


def test_superblocks_of_drafts_are_counted(models) -> None:
    """Of each step, and the most of each request, which its plan tells exactly."""
    model, drafter = models("eagle")
    values = {"policy": "streaming", "budget": 64, "interval": 32}
    values |= {"recent": 16, "spread_events": False}
    jobs = make_jobs([140, 157, 158, 159, 160, 161], 110, seed=8)
    changes = {**SIZES, "speculative_config": drafter}
    with Engine(model, values, **changes) as engine:
        planner = engine.scheduler.kv_policy_planner
        manager, foreseen = engine.scheduler.kv_policy_manager, dict[str, Any]()
        most, peaks = dict[str, int](), dict[str, int]()

        def note(engine: Engine) -> None:
            for request in engine.scheduler.running:
                name, state = request.request_id, planner.states[request.request_id]
                row = len(manager.req_to_blocks[name])
                if name in foreseen and foreseen[name][1] == state.ordinal:
                    assert row == foreseen[name][0]
                computed = request.num_computed_tokens
                known = request.num_tokens + len(request.spec_token_ids)
                end = min(known, computed + SIZES["long_prefill_token_threshold"])
                end = min(end, state.next_event(computed + 1))
                foreseen[name] = row + manager.num_needed(name, end), state.ordinal
                most[name] = max(most.get(name, 0), manager.num_held(name))
                last = request.num_prompt_tokens + request.max_tokens
                peaks[name] = state.footprint.peak_blocks(last)

        engine.run(jobs, note)
    assert len(most) == len(jobs) and all(most[name] <= peaks[name] for name in most)
    assert sum(most[name] == peaks[name] for name in most) > 2


@pytest.mark.parametrize("events", [ALWAYS, PRESSURE])
@pytest.mark.parametrize("policy", ["ams-tova", "adakv-snapkv"])
def test_superblocks_of_drafts_are_foreseen(models, events: str, policy: str) -> None:
    """Where the pool is too small for all, and superblocks end at all places."""
    model, drafter = models("eagle")
    values = {"policy": policy, **VALUES, "interval": 37, "events": events}
    changes = {**SIZES, "num_blocks": 40, "speculative_config": drafter}
    jobs = make_jobs([30 + 41 * n % 300 for n in range(12)], 150, seed=8)
    with Engine(model, values, **changes) as engine:
        run = engine.run(jobs)
        held_back = engine.scheduler.kv_policy_entry.num_held_back
        assert engine.num_free == engine.num_usable
    assert run.preemptions == 0 and held_back > 0
    assert run.counters["events"] > 8
