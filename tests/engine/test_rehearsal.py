"""Events before the first request: carried out, and gone without a trace."""

from pathlib import Path

import pytest
import torch

from support.engine.helpers import Engine, config_of, make_jobs
from vllm_kvpolicy.kernels.window_usage import window_usage
from vllm_kvpolicy.worker.compaction import Compactor
from vllm_kvpolicy.worker.warmup import NAMES, DummyEvents, warm_up

POLICY = {"policy": "ams-tova", "budget": 64, "interval": 32, "recent": 8}


def dummies_of(engine: Engine) -> DummyEvents:
    return engine.worker.kv_policy_setup.dummy_events(engine.runtime.compactor.pool)


@pytest.mark.parametrize(
    "allow", [["snapkv", "epikv", "keydiff"], ["hard-snapkv", "tova+quest"]]
)
def test_answers_are_those_of_an_engine_that_did_not_warm_up(
    tiny_model: Path, allow: list[str]
) -> None:
    answers, events = [], []
    for warms_up in (False, True):
        with Engine(tiny_model, policy=POLICY | {"allow": allow}) as engine:
            runtime = engine.runtime
            if warms_up:
                before = window_usage.calls.total()
                warm_up(runtime, dummies_of(engine))
                assert window_usage.calls.total() > before
                assert not runtime.requests.row_of and not runtime.take_answers()
            policies = engine.worker.kv_policy_config.policies
            assert set(runtime.compactor.most_tokens) == set(policies)
            answers.append(engine.run(make_jobs((40, 100, 150), 60, seed=4)).tokens)
            events.append(engine.counters()["events"])
    assert answers[0] == answers[1]
    assert events[0] == events[1] >= 3


def test_events_have_the_sizes_of_real_ones() -> None:
    config = config_of(POLICY | {"allow": ["keydiff"]})
    steps = list(DummyEvents(config, 4, 32, 100, 600, 2).steps())
    assert {event.policy for step in steps for event in step} == {"ams-tova", "keydiff"}
    assert {len(step) for step in steps} == {1, 2}
    most = dict.fromkeys(config.policies, 0)
    for step in steps:
        blocks = []
        for event, name in zip(step, NAMES, strict=False):
            assert event.request_id == name
            held = event.source_blocks + event.local_blocks
            assert set(event.dest_blocks) <= set(event.source_blocks)
            num_tokens = len(event.source_blocks) * 32 + event.local_tokens(32)
            assert num_tokens > event.budget
            most[event.policy] = max(most[event.policy], num_tokens * len(step))
            blocks += held
        assert len(set(blocks)) == len(blocks) and 0 < min(blocks) <= max(blocks) < 100
    assert DummyEvents(config, 4, 32, 100, 600, 2).most_tokens() == most
    positions = {step[0].position for step in steps}
    # In the last phase, `keydiff` has its first event with a token above the budget;
    # the other policy reads the queries of a whole interval.
    # Prompts grow by half: each ends in an event, and has one more an interval later.
    prompts = {144, 216, 324, 486}
    grown = prompts | {tokens + 32 for tokens in prompts}
    assert {65, 97, 96, 128, 599} | grown == positions
    together = config_of(POLICY | {"spread_events": False})
    unmoved = DummyEvents(together, 4, 32, 100, 600, 2).steps()
    assert {96, 128, 599} | grown == {step[0].position for step in unmoved}
    alone = list(DummyEvents(config, 1, 32, 100, 600, 2).steps())
    assert alone == [step for step in steps if len(step) == 1]
    assert not list(DummyEvents(config, 4, 32, 4, 600, 2).steps()), (
        "the pool holds no such request"
    )
    assert not list(DummyEvents(config, 4, 32, 100, 65, 2).steps()), (
        "no request has an event"
    )
    assert DummyEvents(config, 4, 32, 100, 65, 2).most_tokens() == {}


def test_events_that_find_no_memory_say_what_to_lower(tiny_model, monkeypatch) -> None:
    with Engine(tiny_model, policy=POLICY) as engine:

        def run(self: Compactor, events: list) -> None:
            raise torch.OutOfMemoryError("2 GiB")

        monkeypatch.setattr(Compactor, "run", run)
        said = "ams-tova: no memory for .* at 96 tokens; lower --gpu-memory-utilization"
        with pytest.raises(ValueError, match=said):
            warm_up(engine.runtime, dummies_of(engine))
