"""What judges a run of vLLM's own tests: it misses no difference, and no leak."""

import io

import pytest
from vllm.config import ModelConfig

from support.engine.simulator_engine import make_scheduler, random_scenario
from tools.vllm_tests import STOCK, compare, leaks
from tools.vllm_tests.compare import Expected
from tools.vllm_tests.record import FAILED, PASSED, Record

FILE = "tests/v1/core/test_scheduler.py"


def record(test: str, outcome: str = PASSED, **values) -> Record:
    return Record(f"{FILE}::{test}", outcome, ours=1, **values)


def problems(own: list[Record], *expected: Expected) -> list[str]:
    """Judge a run whose tests all pass in stock vLLM."""
    stock = {each.test: record(each.test.rpartition("::")[2]) for each in own}
    records = {STOCK: stock, "never": {each.test: each for each in own}}
    return compare.problems(records, expected)


def expected(test: str, **values) -> Expected:
    return Expected("why", ("never",), (f"core/test_scheduler.py::{test}",), **values)


def test_what_differs_and_is_not_expected_is_a_problem():
    own = [record("test_a"), record("test_b[1]", FAILED, message="1 == 2")]
    assert problems(own) == [f"never: {FILE}::test_b[1]: 1 == 2"]
    assert not problems(own, expected("test_b"))
    assert not problems(own, expected("test_b[1]"))


def test_what_is_expected_and_differs_no_longer_is_a_problem():
    found = problems([record("test_a")], expected("test_a"))
    assert len(found) == 1 and "test_a differs no longer" in found[0]


def test_a_refusal_has_to_be_one_of_what_the_test_configured():
    row = expected("test_a", refused=True)
    assert not problems([record("test_a", FAILED, refused=["why"])], row)
    found = problems([record("test_a", FAILED, refused=["another"])], row)
    assert len(found) == 1 and "not refused as" in found[0]


def test_what_fails_in_stock_and_what_did_not_run_are_problems():
    stock = {f"{FILE}::test_a": record("test_a", FAILED, message="no model")}
    stock |= {f"{FILE}::test_b": record("test_b"), f"{FILE}::c": record("c")}
    own = {f"{FILE}::test_b": record("test_b")}
    assert compare.problems({STOCK: stock, "never": own}, ()) == [
        f"stock: {FILE}::test_a: no model",
        f"never: {FILE}::c: did not run",
    ]


@pytest.mark.parametrize(("mode", "events"), [("never", 1), ("small", 0)])
def test_a_mode_that_tries_nothing_is_a_problem(mode, events):
    records = {STOCK: {}, mode: {"a": record("a", events=events)}}
    assert len(compare.problems(records, ())) == 1
    records[mode]["a"].events = 1 - events
    assert not compare.problems(records, ())
    records[mode]["a"].ours = 0
    assert len(compare.problems(records, ())) == 1


@pytest.mark.parametrize("what", ["", "state", "superblock", "booking", "count"])
def test_what_a_scheduler_holds_for_nobody_is_a_leak(what, tiny_model):
    model = ModelConfig(model=str(tiny_model), skip_tokenizer_init=True)
    scheduler = make_scheduler(random_scenario("tova", 1, 0), model)
    pool = scheduler.kv_policy_manager.block_pool
    if what == "state":
        scheduler.kv_policy_planner.add("gone", None)
    elif what == "superblock":
        scheduler.kv_policy_manager.req_to_blocks["gone"] = pool.get_new_blocks(1)
    elif what == "booking":
        scheduler.kv_policy_entry.shared.by_request["gone"] = (1, 1, 0, 0)
    elif what == "count":
        pool.blocks[-1].ref_cnt += 1
    assert bool(leaks.find(scheduler)) == bool(what)


@pytest.mark.parametrize("usage", ["0.0", "0.25"])
def test_what_a_server_holds_behind_its_last_request_is_a_leak(usage, monkeypatch):
    metrics = f"""vllm:num_requests_running{{engine="0"}} 0.0
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} {usage}
kvpolicy_events_total{{engine="0"}} 3.0
"""
    monkeypatch.setattr(leaks, "SECONDS", 0)
    monkeypatch.setattr(leaks, "urlopen", lambda url: io.BytesIO(metrics.encode()))
    held = ["vllm:kv_cache_usage_perc is 0.25"] if float(usage) else []
    assert leaks.find_served("http://server/metrics") == (held, 3)
