"""Requests at once, by hand, by a sum of all steps, and by the real scheduler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from support.engine.simulator_engine import Scenario, make_scheduler
from vllm_kvpolicy.block_manager import scheduler as schedulers
from vllm_kvpolicy.block_manager.forecast import held_levels
from vllm_kvpolicy.commands.capacity import Life, most_at_once, phases
from vllm_kvpolicy.config import KVPolicyConfig

N, GROUP = 16, 2


def life(prompt: int, output: int, **values: int) -> Life:
    """Return the life of requests of these lengths: K = 128, I = 64 by default."""
    config = KVPolicyConfig("tova", **{**NUMBERS, **values})
    return Life(config.footprint(prompt, N, GROUP), prompt + output - 1)


NUMBERS = {"budget_tokens": 128, "interval_tokens": 64, "recent_tokens": 32}


def test_without_events_a_request_holds_all_its_blocks():
    # 200 + 57 - 1 = 256 tokens fill 16 blocks of 16; while it answers 13 to 16.
    stock = Life.without_events(200, 256, N)
    assert list(np.unique(stock.levels(0))) == [13, 14, 15, 16]
    assert (stock.prompt_peak, stock.after_event) == (13, None)
    assert [most_at_once([stock], pool) for pool in (15, 16, 47, 48)] == [0, 1, 2, 3]


def test_one_request_by_hand():
    # Phase 0: events at 192, 256... The first leaves 160 + 32 tokens: 32 local ones in
    # 2 blocks and 96 of the rest in 6. Before the next, 96 local ones fill 6: 12 held.
    # `tova` reads 1 query, for which 1 block is lent in the step before an event.
    one = life(100, 300)
    assert one.footprint.window_blocks == 1 and one.after_event == 9
    levels = one.levels(0)
    at = [position - one.first for position in (190, 191, 192, 193, 255, 256)]
    assert list(levels[at]) == [12, 13, 13, 9, 13, 13]
    assert most_at_once([one], 12) == 0
    assert most_at_once([one], 13) == 1


def test_peaks_that_do_not_coincide_let_more_in():
    # At its highest a request holds 13, after an event 9; in the mean K + I / 2, which
    # are 10 blocks, and less than 1.5 for rounding and windows. All take their next
    # block in the same step, which is why the most is somewhat less than the mean says.
    long = life(100, 4000)
    assert long.footprint.most_blocks(long.num_tokens) in (13, 14)
    assert 10 < long.mean < 11.5
    together = Life(long.footprint, long.num_tokens, is_spread=False)
    assert most_at_once([together], 1300) == 1300 // 13
    assert 1300 / 11.8 < most_at_once([long], 1300) < 1300 / long.mean


@pytest.mark.parametrize(
    ("prompt", "output", "values", "pool"),
    [
        (100, 4000, {}, 200),
        (20, 150, {}, 200),
        (20, 400, {"interval_tokens": 33}, 300),
        (900, 700, {"prefill_interval_tokens": 320}, 400),
    ],
)
def test_it_is_the_most_that_the_sum_of_all_steps_allows(prompt, output, values, pool):
    one = life(prompt, output, **values)

    def fits(count: int) -> bool:
        prints = [one._in_phase(phase) for phase in phases(count)]
        levels = [held_levels(each, one.first, one.num_tokens) for each in prints]
        others = np.sum(levels[:-1], axis=0) if count > 1 else np.zeros(1)
        entering = others.max() + prints[0].peak_blocks(prompt + 1)
        return max(np.sum(levels, axis=0).max(), entering) <= pool

    found = most_at_once([one], pool)
    fitting = [count for count in range(1, pool // 6) if fits(count)]
    assert found in fitting and found >= fitting[-1] - 1 > 3


def test_requests_of_two_lengths_take_turns():
    short, long = Life.without_events(16, 32, N), Life.without_events(16, 160, N)
    # 2 and up to 10 blocks, the short ones first; 2 + 10 + 2 is 14, with the next 24.
    found = [most_at_once([short, long], pool) for pool in (11, 13, 14, 24)]
    assert found == [1, 2, 3, 4]


@pytest.mark.parametrize(("prompt", "extra"), [(40, 0), (40, 1), (400, 0)])
def test_the_real_scheduler_runs_as_many_at_once(
    prompt: int, extra: int, tiny_model: Path, monkeypatch
):
    """Prompts that end in an event enter one after the other, within a few steps."""
    scheduler = scheduler_of(tiny_model, spare=7.0, max_num_seqs=99)
    usable = scheduler.kv_policy_manager.num_usable
    count = most_at_once([life(prompt, 500)], usable)
    turns = iter([*phases(count), 0])
    monkeypatch.setattr(schedulers, "request_phase", lambda *_: next(turns))
    for number in range(count + extra):
        scheduler.add_request(request(str(number), prompt, 500))
    waiting, preempted = run(scheduler, 1500)
    scheduler.shutdown()
    assert preempted == 0
    # For the one too many others sit steps out.
    assert (waiting + scheduler.kv_policy_entry.num_waits > 10) == bool(extra)
    assert count > usable // 13


def scheduler_of(tiny_model: Path, depth: int = 1, **changes: Any) -> Any:
    """Return a scheduler of one policy without random traffic."""
    model = ModelConfig(str(tiny_model), skip_tokenizer_init=True, dtype="float32")
    policy = {"policy": "tova", "budget": 128, "interval": 64, "events_per_step": 99}
    limits = {"max_num_seqs": 9, "max_batched": 8192, "long_prefill": 0}
    traffic = {"arrivals": 0.0, "aborts": 0.0, "stops": 0.0, "priorities": False}
    sizes = {"block_size": N, "spare": 0.0, "longest": 900, "seed": 0}
    values = {**sizes, **limits, **traffic, **changes}
    return make_scheduler(Scenario(policy, depth, **values), model)


def test_with_steps_under_way_superblocks_come_back_a_step_later(tiny_model: Path):
    """The scheduler hears of an answer's end when it has scheduled the next step."""
    ends = []
    for depth in (1, 2):
        scheduler = scheduler_of(tiny_model, depth)
        scheduler.add_request(request("0", 40, 100))
        scheduler.schedule()
        ends.append(scheduler.kv_policy_entry.forecast.bookings["0"].end)
        scheduler.shutdown()
    assert ends[1] == ends[0] + 1


def test_who_ends_before_others_grow_enters_a_full_pool(tiny_model: Path, monkeypatch):
    """Nothing is left with which the other one gets to its end, nor need it be."""
    monkeypatch.setattr(
        "support.engine.simulator_engine.max_blocks_per_request", lambda *_: 4
    )
    scheduler = scheduler_of(tiny_model)
    scheduler.add_request(request("long", 2 * N + 2, 2 * N - 3))
    scheduler.schedule()
    scheduler.add_request(request("short", 3, 3))
    assert "short" in scheduler.schedule().num_scheduled_tokens
    assert scheduler.kv_policy_manager.num_free == 0
    scheduler.shutdown()


def request(name: str, prompt: int, output: int) -> Request:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(name, [5] * prompt, params, None)


def run(scheduler: Any, most_steps: int) -> tuple[int, int]:
    """Run to the end; return steps in which somebody waited, and preemptions."""
    waiting = preempted = steps = 0
    while scheduler.has_requests() and steps < most_steps:
        steps += 1
        output = scheduler.schedule()
        waiting += bool(scheduler.waiting)
        preempted += len(output.preempted_req_ids or ())
        names = list(output.num_scheduled_tokens)
        index = {name: place for place, name in enumerate(names)}
        done = ModelRunnerOutput(names, index, [[7]] * len(names))
        scheduler.update_from_output(output, done)
    assert not scheduler.has_requests()
    return waiting, preempted
