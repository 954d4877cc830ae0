"""Beside layers with a sliding window, moving tokens gives stock vLLM's tokens."""

from functools import cache

import pytest

from support.engine.helpers import Engine, Run, make_jobs
from support.made_sliding import NUM_FULL, PATTERN, make_gemma3
from support.sweeps import some
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE

VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256}
LENGTHS = (40, 150, 300, 600)
CASES = {
    "plain": {"max_num_batched_tokens": 96},
    "preemption": {
        "num_blocks": 60,
        "max_model_len": 896,
        "max_num_batched_tokens": 96,
        "foresees": False,
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    model = make_gemma3(tmp_path_factory.mktemp("gemma3"))

    @cache
    def run(
        policy: str | None, case: str, budget: int, events: str = ALWAYS
    ) -> tuple[Run, dict]:
        values = policy and {"policy": policy, **VALUES, "budget": budget}
        if policy:
            values["events"] = events
        if policy == "ams-expected":
            values["policy_config"] = {"expected_window": 40}
        trace = tmp_path_factory.mktemp("trace") if policy else None
        with Engine(model, values or None, trace, **CASES[case]) as engine:
            outcome = engine.run(make_jobs(LENGTHS, 200, seed=5))
            assert engine.num_free == engine.num_usable
            return outcome, engine.counters() if policy else {}

    return run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["identity", "holes"])
def test_moving_is_free_of_error(runs, policy: str, case: str) -> None:
    run, counters = runs(policy, case, 128)
    stock, _ = runs(None, case, 128)
    run.check_answers(stock)
    assert counters["events"] >= 20 and not counters["tokens_dropped"]
    events = [e for r in run.results.values() for e in r.events]
    assert sum(event.moved for event in events) / len(events) > 0.5
    assert {event.survivors.shape[:2] for event in events} == {(NUM_FULL, 2)}
    assert (run.preemptions > 0) == (case == "preemption")


def test_a_model_may_begin_with_full_attention(tmp_path) -> None:
    model, runs = make_gemma3(tmp_path / "model", pattern=PATTERN[::-1]), []
    for values in (None, {"policy": "identity", **VALUES}):
        trace = tmp_path if values else None
        with Engine(model, values, trace, **CASES["plain"]) as engine:
            runs.append(engine.run(make_jobs(LENGTHS, 100, seed=5)))
            assert engine.num_free == engine.num_usable
    runs[1].check_answers(runs[0])
    assert sum(len(result.events) for result in runs[1].results.values()) >= 10


@pytest.mark.parametrize(
    ("policy", "budget", "events"),
    some([("ams-expected", 2048, ALWAYS), ("ams-tova", 2048, ALWAYS)])
    + [("ams-expected", 128, PRESSURE)],
)
def test_what_never_cuts_is_stock(runs, policy: str, budget: int, events: str) -> None:
    """A budget that never binds, and a pool with room in which no event is called."""
    run, counters = runs(policy, "plain", budget, events)
    stock, _ = runs(None, "plain", 128)
    run.check_answers(stock)
    assert not counters["events"] and run.steps == stock.steps


@pytest.mark.parametrize("policy", some(["ams-expected", "ams-tova", "snapkv"]))
def test_a_budget_that_binds_drops_tokens(runs, policy: str) -> None:
    run, counters = runs(policy, "plain", 128)
    assert counters["tokens_dropped"] > 0
    assert run.tokens != runs(None, "plain", 128)[0].tokens
