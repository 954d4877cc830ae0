"""What requests hold, counted: against a walk over all blocks, with and without events.

The walk looks at every block list after every allocation and every step.
"""

from collections import Counter
from typing import Any

import pytest

from support.engine.helpers import BLOCK, Engine, make_jobs
from support.engine.simulator import Simulation
from support.engine.simulator_engine import random_scenario
from support.sweeps import trials
from vllm_kvpolicy.compat import COUNTING_CLASSES

FIELDS = ("steps", "request_steps", "block_steps", "requests", "peak_blocks")
FIELDS += ("bounded_requests", "uncut_requests")


class Walk:
    """Counts what a scheduler's requests hold by looking at their blocks.

    Args:
        scheduler: what it allocates, schedules and frees is looked at from now on.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.totals: Counter[str] = Counter()
        self.peaks: dict[str, int] = {}
        self.cut: set[str] = set()
        self._watch(scheduler.kv_cache_manager, "allocate_slots", self._look)
        self._watch(scheduler, "schedule", self._step)
        free = scheduler._free_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            peak = self.peaks.pop(request.request_id, 0)
            self.totals["requests"] += peak > 0
            self.totals["peak_blocks"] += peak
            is_bounded = scheduler.kv_policy_entry.is_bounded(request.request_id)
            self.totals["bounded_requests"] += peak > 0 and is_bounded
            is_uncut = peak > 0 and is_bounded and request.request_id not in self.cut
            self.totals["uncut_requests"] += is_uncut
            return free(request, *args, **kwargs)

        scheduler._free_request = counted

    def _watch(self, owner: Any, name: str, look: Any) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            look(result)
            return result

        setattr(owner, name, watched)

    def _look(self, _: Any = None) -> int:
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        windows = getattr(manager, "_windows", {})
        held = {
            request_id: sum(not block.is_null for block in blocks)
            + len(windows.get(request_id, ()))
            for request_id, blocks in manager.req_to_blocks.items()
        }
        for request_id, count in held.items():
            self.peaks[request_id] = max(count, self.peaks.get(request_id, 0))
        return sum(held.values())

    def _step(self, output: Any) -> None:
        num_held = self._look()
        self.cut |= {each.request_id for each in output.kv_policy_commands.events}
        if output.num_scheduled_tokens:
            self.totals["steps"] += 1
            self.totals["request_steps"] += len(self.scheduler.running)
            self.totals["block_steps"] += num_held


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["tova", "holes", "hard-tova"])
def test_counters_are_what_a_walk_over_all_blocks_finds(policy, depth, model_config):
    """Events, answers that give blocks back, preemptions, aborts, early ends."""
    seen: Counter[str] = Counter()
    for seed in range(5):
        scenario = random_scenario(policy, depth, seed)
        simulation = Simulation(scenario, model_config)
        walk = Walk(simulation.scheduler)
        counters = simulation.scheduler.kv_policy_counters
        seen += simulation.run(trials(600))
        found = counters.read()
        assert {name: found[name] for name in FIELDS} == walk.totals
        seen["uncut"] += int(found["uncut_requests"])
        seen["cut"] += int(found["bounded_requests"] - found["uncut_requests"])
        assert not simulation.scheduler._peaks_before_preemption
    assert min(seen[key] for key in ("events", "preemptions", "aborts")) > 3, seen
    assert policy != "hard-tova" or seen["superblocks trimmed"] > 10
    is_both = min(seen["cut"], seen["uncut"]) > 3
    assert is_both if policy != "holes" else not seen["cut"] + seen["uncut"], seen


def test_stock_counts_what_whole_requests_hold(tiny_model):
    """Blocks grow by one every BLOCK tokens; the last token has no place."""
    prompts, output = (40, 100, 7), 70
    jobs = make_jobs(prompts, output, seed=3)
    with Engine(tiny_model, scheduler_cls=COUNTING_CLASSES[True]) as engine:
        name = f"{type(engine.scheduler).__module__}.{type(engine.scheduler).__name__}"
        is_async = bool(engine.scheduler.vllm_config.scheduler_config.async_scheduling)
        assert name == COUNTING_CLASSES[is_async]
        engine.run(jobs)
        found = engine.counters()
    lengths = [prompt + output - 1 for prompt in prompts]
    assert found["requests"] == 3
    assert found["peak_blocks"] == sum(-(-length // BLOCK) for length in lengths)
    assert (found["steps"], found["request_steps"]) == (output, 3 * output)
    held = [
        -(-(prompt + step) // BLOCK) for prompt in prompts for step in range(output)
    ]
    assert found["block_steps"] == sum(held)
    assert found["events"] == 0


def test_a_preempted_request_is_one_request(tiny_model):
    """Its peak is the largest of all times that it ran."""
    small = {"num_blocks": 9, "max_model_len": 192}
    counting = COUNTING_CLASSES[False]
    with Engine(tiny_model, scheduler_cls=counting, **small) as engine:
        run = engine.run(make_jobs((60, 60), 120, seed=5))
        found = engine.counters()
    assert run.preemptions > 0
    assert (found["requests"], found["peak_blocks"]) == (2, 2 * -(-179 // BLOCK))
    assert found["steps"] < found["request_steps"] < 2 * found["steps"]
