"""Events that are called for when the pool runs short: who has one, when, how deep.

Real schedulers, without a worker; test_scheduler_simulation runs them with one.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from support import sweeps
from support.calibration_files import options_for
from support.engine.scheduler_steps import run_step, sampled
from support.engine.simulator_engine import Scenario, make_scheduler
from vllm_kvpolicy.block_manager.entry import Entry
from vllm_kvpolicy.block_manager.levels import Row, water_fill
from vllm_kvpolicy.block_manager.manager import KVPolicyManager
from vllm_kvpolicy.block_manager.planner import Call, RequestPlan, RequestState
from vllm_kvpolicy.block_manager.pressure import Pressure
from vllm_kvpolicy.events import EventPlan, Footprint
from vllm_kvpolicy.observe import metrics, snapshots
from vllm_kvpolicy.policies.names import names, parse

SIZE = 32
MIX = Scenario(
    policy={
        "policy": "ams-tova",
        "budget": 96,
        "interval": 64,
        "recent": 16,
        "sinks": 4,
        "events": "pressure",
    },
    block_size=SIZE,
    max_batched=96,
    longest=640,
    pool=54,
)
PROMPTS = (40, 77, 114, 151, 188, 225, 262, 299)


@dataclass
class Run:
    """What an engine did until all had their answers.

    Attributes:
        steps, tokens, preemptions: how many; prompts count, each time.
        first: by request, the step of its first token.
        events: request, position and budget of each.
        computed: by step, how many tokens of each request had been computed then.
        dropped: tokens per KV head that events dropped, of all requests.
        pinned: superblocks that events left alone; several lists where they differ.
        most: requests at once.
        cached: superblocks in the prefix cache at the end.
    """

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    first: dict[str, int] = field(default_factory=dict)
    events: list[tuple[str, int, int]] = field(default_factory=list)
    computed: list[dict[str, int]] = field(default_factory=list)
    dropped: int = 0
    pinned: set[tuple[int, ...]] = field(default_factory=set)
    most: int = 0
    cached: set[int] = field(default_factory=set)

    @property
    def cost(self) -> int:
        """Time that it took: a step costs about as much as ten tokens more in it."""
        return 10 * self.steps + self.tokens


def serve(
    scenario: Scenario,
    model: ModelConfig,
    prompts: Sequence[int],
    answers: Sequence[int],
    urgent: dict[int, int] | None = None,
    may_stop: bool = False,
    extra_args: dict[int, Any] | None = None,
) -> Run:
    """Give every request its answer, all steps in order.

    Args:
        may_stop: answers could end by themselves, so that their lengths are not known.
        extra_args: of requests, by number.
        urgent: by number of a request that comes late, the step before it comes; it is
            more urgent than the others.
    """
    scheduler, run, late = make_scheduler(scenario, model), Run(), dict(urgent or {})
    hasher = None
    if scenario.caching:
        init_none_hash(sha256)
        hasher = get_request_block_hasher(SIZE, sha256)
    last_event: dict[str, tuple[int, int]] = {}

    def add(number: int) -> None:
        alone = [10 + number] * (SIZE if scenario.caching else 0)
        scheduler.add_request(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=[5] * (prompts[number] - len(alone)) + alone,
                block_hasher=hasher,
                sampling_params=SamplingParams(
                    max_tokens=answers[number],
                    ignore_eos=not may_stop,
                    extra_args=(extra_args or {}).get(number),
                ),
                pooling_params=None,
                priority=int(number not in late),
                arrival_time=float(number),
            )
        )

    def answer(request: Request) -> list[int]:
        tokens = sampled(request)
        run.computed[-1][request.request_id] = request.num_computed_tokens
        if tokens:
            run.first.setdefault(request.request_id, run.steps)
        return tokens

    for number in range(len(prompts)):
        if number not in late:
            add(number)
    while scheduler.has_requests():
        for number in [each for each, step in late.items() if step == run.steps]:
            add(number)
        run.steps += 1
        run.computed.append({})
        output = run_step(scheduler, answer)
        run.tokens += output.total_num_scheduled_tokens
        run.preemptions += len(output.preempted_req_ids or ())
        for event in output.kv_policy_commands.events:
            run.events.append((event.request_id, event.position, event.budget))
            last_event[event.request_id] = event.position, event.budget
            run.pinned.add(event.pinned_blocks)
        run.most = max(run.most, len(scheduler.running))
    pool = scheduler.kv_cache_manager.block_pool
    run.cached = {each.block_id for each in pool.blocks if each.block_hash is not None}
    scheduler.shutdown()
    run.dropped = sum(position - budget for position, budget in last_event.values())
    return run


def test_with_room_for_all_nothing_is_dropped(model_config: ModelConfig) -> None:
    run = serve(replace(MIX, pool=400), model_config, PROMPTS, [300] * 8)
    assert (run.events, run.preemptions) == ([], 0)
    never = {**MIX.policy, "budget": 600, "events": "always"}
    stock = serve(
        replace(MIX, policy=never, pool=400), model_config, PROMPTS, [300] * 8
    )
    assert run == stock


def test_steps_do_without_system_calls(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would let other threads of Python run while the model waits for a step."""
    calls: list[str] = []
    for name in ("pread", "pwrite"):
        known = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, known=known: calls.append("") or known(*args)
        )
    for module in (metrics, snapshots):  # nothing gets old
        monkeypatch.setattr(module, "PERIOD_SECONDS", 3600.0)
    watched = replace(MIX, policy={**MIX.policy, "live": True}, pool=1000)
    assert serve(watched, model_config, [40] * 3, [400] * 3).steps >= 400
    assert len(calls) < 200  # as it starts, and where a request ends


@pytest.mark.parametrize("may_stop", [False, True])
@pytest.mark.parametrize("events", ["always", "pressure"])
def test_pinned_superblocks_count_once_and_stay_cached(
    model_config: ModelConfig, events: str, may_stop: bool
) -> None:
    """Seven come while the first runs, which ends before them, and all fit at once.

    10 superblocks are pinned; each request holds about 6 behind them.
    """
    policy = {**MIX.policy, "pin": 10 * SIZE, "events": events, "interval": 32}
    scenario = replace(MIX, policy=policy, caching=True, pool=60, max_batched=512)
    prompts, answers = [11 * SIZE] * 8, [150, *[280] * 7]
    late = dict.fromkeys(range(1, 8), 3)
    run = serve(scenario, model_config, prompts, answers, late, may_stop)
    assert (run.preemptions, run.most) == (0, 8)
    assert run.steps < 290
    (pinned,) = run.pinned
    assert len(pinned) == 10 and run.cached >= set(pinned)
    floor = scenario.policy["budget"]
    budgets = {budget for *_, budget in run.events}
    assert min(budgets) >= floor and (budgets == {floor}) == (events == "always")
    # 36 where each is held to have the pinned superblocks for itself after its event.
    assert events == "always" or len(run.events) <= 20


@pytest.mark.parametrize("events", ["always", "pressure"])
def test_what_others_keep_is_not_computed_again(
    model_config: ModelConfig, events: str
) -> None:
    """So that one enters who has to stop before its floor fits: it loses little.

    33 of a prompt's 34 superblocks are common; a floor of 512 tokens is nearly all of
    an answer. Stock takes 784 steps with 3 preemptions.
    """
    policy = {**MIX.policy, "budget": 512, "recent": 32, "events": events}
    policy |= {"pin": "prompt"}
    changes = {"caching": True, "pool": 150, "max_batched": 2048, "longest": 1688}
    run = serve(
        replace(MIX, policy=policy, **changes), model_config, [1088] * 8, [600] * 8
    )
    assert run.steps < 830 and run.preemptions <= 3
    assert run.cost < 16_000  # stock's is 14,968


def test_pinned_superblocks_are_shared_longer_than_was_expected(
    model_config: ModelConfig,
) -> None:
    """Answers of unknown length are expected to have 256 tokens, and have 340."""
    scenario = replace(
        MIX, policy={**MIX.policy, "pin": 8 * SIZE}, caching=True, pool=118
    )
    late = dict.fromkeys(range(1, 8), 9)
    run = serve(scenario, model_config, [9 * SIZE] * 8, [340] * 8, late, may_stop=True)
    assert (run.events, run.preemptions, run.most) == ([], 0, 8)


def test_a_mix_that_does_not_fit_takes_no_longer_than_with_room(
    model_config: ModelConfig,
) -> None:
    """Floors of 96 tokens; 54 superblocks hold 216 tokens of each of the eight."""
    run = serve(MIX, model_config, PROMPTS, [300] * 8)
    assert run.preemptions == 0 and run.steps <= 330  # 315 with room for all
    assert max(run.first.values()) <= 20
    budgets = [budget for _, _, budget in run.events]
    assert budgets and min(budgets) >= 96 and max(budgets) > 120
    never = replace(MIX, policy={**MIX.policy, "budget": 600, "events": "always"})
    assert serve(never, model_config, PROMPTS, [300] * 8).steps > 1.8 * run.steps


@pytest.mark.parametrize("events", ["always", "pressure"])
def test_no_mix_takes_longer_than_by_vllms_rule(
    model_config: ModelConfig, events: str
) -> None:
    """Floors that all, some and none are cut to, in 0.15 to 0.6 of what all hold."""
    ratios = []
    for seed in range(sweeps.trials(48)):
        rng = random.Random(seed)
        count, floor = rng.randint(3, 20), (64, 384, 600, 1000)[seed % 4]
        prompts = [rng.randint(20, 400) for _ in range(count)]
        answers = [rng.randint(50, 700) for _ in range(count)]
        whole = sum(-(-(p + a) // SIZE) for p, a in zip(prompts, answers, strict=True))
        policy = {**MIX.policy, "policy": "tova", "budget": floor, "events": events}
        scenario = replace(
            MIX,
            policy=policy,
            longest=1152,
            max_num_seqs=rng.choice((8, 32)),
            max_batched=rng.choice((96, 512)),
            pool=max(int(whole * rng.uniform(0.15, 0.6)), 44),
        )
        stock = {number: {"kv_policy": "none"} for number in range(count)}
        ours = serve(scenario, model_config, prompts, answers)
        theirs = serve(scenario, model_config, prompts, answers, extra_args=stock)
        ratios.append(ours.cost / theirs.cost)
    print([round(ratio, 2) for ratio in ratios])
    assert max(ratios) <= 1.1 and sum(ratios) < 0.95 * len(ratios)


@pytest.mark.parametrize(
    ("pool", "prompts", "answers"),
    [
        (80, [30] * 12, [600] * 12),
        # The longest one is the third: it gets far before it has to stop.
        (44, [286, 81, 281, 122], [452, 405, 591, 346]),
    ],
    ids=["twelve", "four"],
)
def test_a_floor_that_nobody_reaches_keeps_nobody_waiting(
    model_config: ModelConfig, pool: int, prompts: list[int], answers: list[int]
) -> None:
    """A floor of 1,000 tokens: nobody is cut, and stock preempts."""
    policy = {**MIX.policy, "budget": 1000}
    sizes = {"pool": pool, "longest": 1152, "max_num_seqs": 12, "max_batched": 512}
    scenario = replace(MIX, policy=policy, **sizes)
    run = serve(scenario, model_config, prompts, answers)
    stock = {number: {"kv_policy": "none"} for number in range(len(prompts))}
    theirs = serve(scenario, model_config, prompts, answers, extra_args=stock)
    assert not run.events and run.cost <= 1.05 * theirs.cost
    assert max(run.first.values()) <= 2 * max(theirs.first.values())


def test_an_older_request_does_not_wait_for_a_newer_one_to_end(
    model_config: ModelConfig,
) -> None:
    """The newer one has events, and goes on between them with what is left."""
    policy = {"policy": "tova", "budget": 512, "interval": 512, "recent": 16}
    sizes = {"block_size": 16, "pool": 68, "longest": 8000, "max_batched": 2048}
    few = {"kv_budget": 64, "kv_interval": 64}
    run = serve(
        replace(MIX, policy={**policy, "sinks": 4, "events": "always"}, **sizes),
        model_config,
        [20, 20],
        [1500, 6000],
        extra_args={1: few},
    )
    last = max(step for step, names in enumerate(run.computed) if "r0" in names)
    assert 1500 < last <= 1500 + 2 * 128 and run.steps > 6000


def test_prompts_are_cut_at_their_ends_for_one_that_waits(
    model_config: ModelConfig,
) -> None:
    run = serve(MIX, model_config, PROMPTS, [300] * 8)
    at_ends = {(f"r{number}", length) for number, length in enumerate(PROMPTS)}
    assert at_ends & {(name, position) for name, position, _ in run.events[:2]}


SHARED_PREFIX = {
    "caching": True,
    "max_batched": 2048,
    "longest": 1152,
    "max_num_seqs": 16,
}


@pytest.mark.parametrize(
    ("pool", "count", "answer", "may_stop", "pays"),
    [
        (130, 8, 400, True, False),
        (200, 16, 150, False, False),
        (108, 16, 150, False, False),
        (90, 8, 350, False, True),
    ],
)
def test_a_prefix_that_several_hold_is_held_once(
    pool: int,
    count: int,
    answer: int,
    may_stop: bool,
    pays: bool,
    model_config: ModelConfig,
) -> None:
    """All fit, or to cut them would take more superblocks, or it pays."""
    policy = {**MIX.policy, "policy": "tova", "budget": 256}
    scenario = replace(MIX, policy=policy, pool=pool, **SHARED_PREFIX)
    load = [544] * count, [answer] * count, dict.fromkeys(range(1, count), 3), may_stop
    run = serve(scenario, model_config, *load)
    none = {number: {"kv_policy": "none"} for number in range(count)}
    stock = serve(scenario, model_config, *load, extra_args=none)
    assert bool(run.events) == pays and run.preemptions <= stock.preemptions
    assert run.steps <= stock.steps - pays * 80


@pytest.mark.parametrize(("without", "pool"), [([0], 84), ([0, 1, 2, 3, 4], 84)])
def test_requests_without_a_policy_are_given_room_to_grow(
    without: list[int], pool: int, model_config: ModelConfig
) -> None:
    none = {number: {"kv_policy": "none"} for number in without}
    scenario = replace(MIX, pool=pool)
    run = serve(scenario, model_config, PROMPTS, [300] * 8, extra_args=none)
    assert (run.steps, run.preemptions) == (315, 0)


@pytest.mark.parametrize(
    ("pool", "budget", "prompt"),
    [
        (30, 96, 600),  # its prompt has no room beside the floors of the others
        (26, 256, 500),  # those who run fit to their ends, without another window
    ],
)
def test_nobody_is_cut_for_one_that_cannot_enter(
    pool: int, budget: int, prompt: int, model_config: ModelConfig
) -> None:
    scenario = replace(MIX, pool=pool, policy={**MIX.policy, "budget": budget})
    prompts, answers = [100, 100, prompt], [300, 300, 20]
    run = serve(scenario, model_config, prompts, answers, urgent={2: 150})
    assert not run.events and run.first["r2"] > 300


def test_nobody_is_cut_while_a_prompt_before_takes_the_steps(
    model_config: ModelConfig,
) -> None:
    """The fourth comes at step 16, and can begin at step 65."""
    policy = {**MIX.policy, "policy": "streaming", "budget": 64}
    scenario = replace(MIX, policy=policy, pool=44, longest=1152, max_batched=20)
    prompts, answers = [150, 150, 900, 200], [150, 150, 20, 20]
    run = serve(scenario, model_config, prompts, answers, urgent={3: 16})
    first = next(i for i, known in enumerate(run.computed) if "r3" in known)
    cut = [position for name, position, _ in run.events if name == "r0"]
    computed = run.computed[first - 8].get("r0", 0)
    assert run.preemptions == 0 and cut
    assert all(position >= computed for position in cut)


@pytest.mark.parametrize("pool", [59, 80])
def test_events_of_a_call_come_one_after_the_other(
    pool: int, model_config: ModelConfig
) -> None:
    """Eight that grow alike: a step with all of their events would stall them all."""
    run = serve(replace(MIX, pool=pool), model_config, [40] * 8, [300] * 8)
    steps = [
        step
        for name, position, _ in run.events
        for step, computed in enumerate(run.computed)
        if computed.get(name) == position
    ]
    assert len(steps) == len(run.events) >= 4 and len(steps) - len(set(steps)) < 2
    assert (run.steps, run.preemptions) == (304, 0)


def test_an_urgent_request_enters_while_others_are_cut(
    model_config: ModelConfig,
) -> None:
    """Six that grow fill the pool; the urgent one has its token in two windows."""
    scenario = replace(MIX, priorities=True, pool=52)
    prompts, answers = [100] * 6 + [90], [300] * 6 + [20]
    run = serve(scenario, model_config, prompts, answers, urgent={6: 150})
    assert run.preemptions == 0
    assert run.first["r6"] <= 150 + 2 * SIZE + 4
    assert "r6" not in {name for name, _, _ in run.events}


def test_a_scorer_without_a_window_cuts_in_the_step_that_needs_it(
    model_config: ModelConfig,
) -> None:
    """A token later the event itself would need a superblock of the full pool."""
    scenario = replace(MIX, policy={**MIX.policy, "policy": "streaming"}, pool=20)
    run = serve(scenario, model_config, PROMPTS[:6], [300] * 6)
    assert run.steps <= 606 and run.preemptions == 0


@pytest.mark.parametrize("step", [270, 280])
def test_an_urgent_request_waits_for_nobody_who_is_about_to_end(
    step: int, model_config: ModelConfig
) -> None:
    """They would have their last tokens before they could be cut."""
    prompts, answers = [100] * 6 + [90], [300] * 6 + [20]
    scenario = replace(MIX, priorities=True, pool=40)
    run = serve(scenario, model_config, prompts, answers, urgent={6: step})
    assert run.first["r6"] <= step + 4


@pytest.mark.parametrize(
    ("pool", "watermark", "is_cut", "wait"),
    [
        (40, 0.1, False, 3),
        (40, 0.5, True, 50),
        (30, 0.5, False, 200),
        (40, 0.65, False, 200),
    ],
)
def test_nobody_is_cut_for_one_that_the_watermark_keeps_out(
    pool: int, watermark: float, is_cut: bool, wait: int, model_config: ModelConfig
) -> None:
    """A third comes when two run: it has room, at their floors only, or not even so."""
    scenario = replace(MIX, pool=pool, watermark=watermark)
    prompts, answers = [100, 100, 200], [300, 300, 20]
    run = serve(scenario, model_config, prompts, answers, urgent={2: 150})
    assert bool(run.events) is is_cut and not run.preemptions, run.events
    assert run.first["r2"] <= 150 + wait


@pytest.mark.parametrize(("policy", "window"), [("tova", 1), ("ams-tova", 32)])
def test_an_urgent_request_waits_as_long_as_a_cut_takes(
    policy: str, window: int, model_config: ModelConfig
) -> None:
    """A window of queries and some steps; after that others are preempted.

    Where they were cut just now, they would not be cut again for an interval's part.
    """
    values = {**MIX.policy, "policy": policy, "interval": 128}
    changes = {"priorities": True, "max_num_seqs": 16, "max_batched": 256}
    scenario = replace(MIX, policy=values, longest=1024, **changes)
    num_late = 0
    for seed in range(8, 16):
        rng = random.Random(seed)
        prompts = [rng.randrange(40, 300) for _ in range(12)] + [90]
        answers = [rng.randrange(200, 600) for _ in range(12)] + [20]
        step = rng.randrange(100, 350)
        run = serve(scenario, model_config, prompts, answers, urgent={12: step})
        wait = run.first["r12"] - step
        assert wait <= window + 8
        num_late += wait > 2
    assert num_late > 1, "there was room without any cut"


def hindsight(run: Run, last: dict[str, int], floor: int, pool: int) -> int:
    """Return the tokens that have to be dropped, by one who knows all ends.

    In each step that takes more than the pool, whole superblocks of those who will stay
    longest are dropped, and no earlier.
    """
    dropped = dict.fromkeys(last, 0)
    there: dict[str, int] = {}
    for step, computed in enumerate(run.computed):
        there |= computed
        held = {
            name: tokens - dropped[name]
            for name, tokens in there.items()
            if step <= last[name]
        }
        while sum(-(-tokens // SIZE) for tokens in held.values()) > pool:
            able = [name for name, tokens in held.items() if tokens - SIZE >= floor]
            longest = max(able, key=lambda name: (last[name], held[name]))
            dropped[longest] += SIZE
            held[longest] -= SIZE
    return sum(dropped.values())


def test_little_more_is_dropped_than_with_hindsight(model_config: ModelConfig) -> None:
    """Small cases, of a scorer without a query window."""
    rng, ours, best = random.Random(4), 0, 0
    policy = {**MIX.policy, "policy": "streaming", "budget": 64}
    for _ in range(sweeps.trials(100)):
        count = rng.randint(2, 6)
        prompts = [rng.randint(20, 250) for _ in range(count)]
        answers = [rng.randint(50, 380) for _ in range(count)]
        whole = sum(-(-(p + a) // SIZE) for p, a in zip(prompts, answers, strict=True))
        pool = max(int(whole * rng.uniform(0.4, 0.9)), 21)
        run = serve(
            replace(MIX, policy=policy, pool=pool), model_config, prompts, answers
        )
        assert run.preemptions == 0
        last = {
            name: max(i for i, step in enumerate(run.computed) if name in step)
            for name in run.first
        }
        least = hindsight(run, last, 64, pool)
        ours, best = ours + run.dropped, best + least
    print("dropped", ours, "with hindsight", best)
    assert ours <= 1.25 * best


def gain(row: Row, budget: int) -> int:
    """Return the superblocks that come back; 0 where an event is not worth it."""
    kept = -(-(budget - row.local) // SIZE)
    return max(row.whole - kept, 0) if row.held - budget >= row.spacing else 0


def brute_force(rows: list[Row], lacking: int) -> int | None:
    """Return the highest level at which enough comes back, one by one."""
    for level in range(max(row.held for row in rows), -1, -1):
        if sum(gain(row, max(level, row.floor)) for row in rows) >= lacking:
            return level
    return None


def random_row(rng: random.Random, name: str, priority: int = 0) -> Row:
    position, floor = rng.randint(100, 600), rng.randint(40, 200)
    frontier = (position - 16) // SIZE
    return Row(
        request_id=name,
        priority=priority,
        position=position,
        held=position,
        floor=floor,
        spacing=rng.choice((16, 32, 64)),
        local=position - frontier * SIZE,
        whole=frontier - rng.choice((0, 0, 3)),
    )


def test_the_level_is_the_highest_that_suffices() -> None:
    rng = random.Random(1)
    for _ in range(300):
        rows = [random_row(rng, str(n)) for n in range(rng.randint(1, 5))]
        lacking = rng.randint(1, 20)
        level, found = brute_force(rows, lacking), water_fill(rows, lacking, SIZE)
        assert (found is None) == (level is None)
        if found is None:
            continue
        assert sum(gain(row, budget) for row, budget in found) >= lacking
        assert all(budget == max(level, row.floor) for row, budget in found)


def test_the_least_urgent_are_cut_first_and_to_their_floors() -> None:
    rng = random.Random(2)
    rows = [random_row(rng, str(n), priority=n % 2) for n in range(6)]
    of_late = sum(gain(row, row.floor) for row in rows if row.priority)
    chosen = water_fill(rows, of_late, SIZE)
    assert chosen is not None and {row.priority for row, _ in chosen} == {1}
    more = water_fill(rows, of_late + 1, SIZE)
    assert more is not None and {row.priority for row, _ in more} == {0, 1}
    floors = {row.floor == budget for row, budget in more if row.priority}
    assert floors == {True}


def test_one_whose_superblocks_others_hold_is_cut_last(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives nothing back as long as they hold them."""
    stock = KVPolicyManager.num_shared
    monkeypatch.setattr(
        KVPolicyManager,
        "num_shared",
        lambda self, name: 12 if name == "r6" else stock(self, name),
    )
    run = serve(replace(MIX, pool=62), model_config, PROMPTS, [300] * 8)
    cut = [name for name, _, _ in run.events]
    assert cut and "r6" not in cut[: len(set(cut)) - 1], run.events


def test_one_that_ends_soon_is_not_cut(model_config: ModelConfig) -> None:
    """When one of two needs a superblock more, it has three tokens left."""
    run = serve(replace(MIX, pool=17), model_config, [200, 200], [60, 300])
    assert {name for name, _, _ in run.events} == {"r1"}


def test_who_ends_soon_is_cut_if_nobody_else_can_be(model_config: ModelConfig) -> None:
    """Both end soon; without room the later one would wait 6 steps for the first."""
    run = serve(replace(MIX, pool=10), model_config, [139, 85], [60, 60])
    assert (run.steps, len(run.events)) == (116, 1), run.events


def test_windows_of_many_lengths_beside_prompts_that_stay(
    model_config: ModelConfig, tmp_path: Path
) -> None:
    """Windows that open together take superblocks that others need meanwhile.

    This one, found by a check on a GPU, ended in a preemption after 60 steps in which
    fewer and fewer requests went on, though some could be cut at once.
    """
    chosen = [name for name in names() if is_equal(name)]
    options: dict[str, Any] = {"expected_window": 48, "snapmax_window": 48}
    for scorer in ("triattention", "qfilter"):
        options |= options_for(scorer, tmp_path, 2, 2, 2, 32)
    policy = {
        "policy": chosen[0],
        "allow": chosen[1:],
        "policy_config": options,
        "events": "pressure",
        "budget": 150,
        "interval": 130,
        "prefill_interval": 256,
        "recent": 40,
        "sinks": 5,
    }
    sizes = {"pool": 61, "max_num_seqs": 64, "max_batched": 128, "longest": 832}
    count = len(chosen)
    run = serve(
        replace(MIX, policy=policy, **sizes),
        model_config,
        [(37, 180, 300, 430)[number % 4] for number in range(count)],
        [290] * count,
        extra_args={n: {"kv_policy": name} for n, name in enumerate(chosen)},
    )
    assert count > 50 and len(run.events) > 2 * count
    # 41 and 3,427 by vLLM's rule.
    assert run.preemptions <= 4 and run.steps < 2700


def test_a_ceiling_bounds_what_is_held_with_room_for_all(
    model_config: ModelConfig,
) -> None:
    """Prompts above it are cut at their ends; others an interval later, in turn."""
    policy = {**MIX.policy, "ceiling": 160}
    scenario = replace(MIX, pool=400, policy=policy)
    run = serve(scenario, model_config, PROMPTS, [300] * 8)
    assert (run.steps, run.preemptions) == (315, 0)
    first: dict[str, int] = {}
    for name, position, budget in run.events:
        assert budget == 160
        first.setdefault(name, position)
    ends = [max(160 + 64, tokens) for tokens in PROMPTS]  # C + I
    found = [first[f"r{number}"] for number in range(8)]
    early = [end - position for end, position in zip(ends, found, strict=True)]
    # Each by its phase, but those whose prompts hold more.
    assert all(0 <= each < 64 for each in early) and early[5:] == [0, 0, 0]
    assert len(set(found)) > 4, found
    for name in first:
        mine = [position for who, position, _ in run.events if who == name]
        gaps = [b - a for a, b in zip(mine, mine[1:], strict=False)]
        assert gaps and all(32 <= gap <= 96 for gap in gaps), (name, mine)
    short = serve(replace(scenario, pool=54), model_config, PROMPTS, [300] * 8)
    deeper = [budget for *_, budget in short.events if budget < 160]
    assert short.preemptions == 0 and deeper and min(deeper) >= 96


def test_an_event_leaves_room_until_the_next_one(model_config: ModelConfig) -> None:
    """One alone, in a pool for its floor and an interval, but not for its ceiling."""
    policy = {**MIX.policy, "interval": 100, "ceiling": 144}
    run = serve(replace(MIX, policy=policy, pool=8), model_config, [40], [331])
    budgets = [budget for *_, budget in run.events]
    assert run.preemptions == 0 and 96 <= min(budgets) < 144, budgets


def test_who_can_be_cut_at_once_is_when_somebody_is_stopped() -> None:
    """The least urgent first, one that ends soon too; nobody whose window has to fill.

    They lack two superblocks in this step, and each that is cut gives one or more back.
    """
    fields = {"position": 300, "held": 300, "floor": 96, "spacing": 32, "local": 44}
    rows = [
        Row("urgent", 0, **fields, whole=8),
        Row("waits", 2, **fields, whole=9, wait=32),
        Row("ends", 1, **fields, whole=3, ends=True),
        Row("other", 1, **fields, whole=4),
    ]
    cut: list[str] = []
    limits = SimpleNamespace(block_size=SIZE, events_per_step=8)
    engine = SimpleNamespace(
        planner=SimpleNamespace(limits=limits),
        forecast=SimpleNamespace(ahead=lambda last: np.array([70])),
        running={},
    )
    pressure: Any = SimpleNamespace(
        engine=engine,
        lead_steps=49,
        notice=48,
        _effect=49,
        _most=lambda last, coming, first: 60,
        _to_level=lambda rows, usable, coming: [],
        _have=lambda name, call, cause: cut.append(name),
    )
    nobody = np.zeros(1, np.int64)
    Pressure._call(pressure, rows, 67, nobody, "growth")
    assert cut == ["ends", "other"], cut
    cut.clear()
    Pressure._call(pressure, rows, 70, nobody, "growth")
    assert not cut


def test_events_of_a_step_are_looked_at_again_where_no_call_is_due() -> None:
    """The pool runs short in the end, but not before one that is called for now."""
    done: list[str] = []
    manager = SimpleNamespace(num_taken=10, num_usable=12)
    forecast = SimpleNamespace(most=lambda: 20)
    pressure: Any = SimpleNamespace(
        engine=SimpleNamespace(manager=manager, forecast=forecast),
        lead_steps=5,
        room=lambda: 12,
        _unforeseen=lambda last: np.zeros(last + 1, np.int64),
        _most=lambda last, coming: 10,
        _deepen=lambda usable, coming: done.append("deepened"),
        _rows=lambda: done.append("called") or [],
    )
    Pressure._make_room(pressure, [])
    assert done == ["deepened"]


def test_who_is_cut_after_others_is_so_before_the_next_window_opens() -> None:
    """That of an event inside its prompt: it would lack the queries before."""
    fields = {"position": 300, "held": 300, "floor": 96, "spacing": 32, "local": 44}
    rows = [Row(f"r{n}", 0, **fields, whole=8, latest=301) for n in range(4)]
    found: list[int] = []
    limits = SimpleNamespace(block_size=SIZE, events_per_step=1)
    pressure: Any = SimpleNamespace(
        engine=SimpleNamespace(planner=SimpleNamespace(limits=limits), running={}),
        lead_steps=49,
        notice=48,
        _effect=49,
        _most=lambda last, coming, first: 110,
        _to_level=lambda rows, usable, coming: [(row, 96) for row in rows],
        _have=lambda name, call, cause: found.append(call.position),
    )
    Pressure._call(pressure, rows, 60, np.zeros(1, np.int64), "growth")
    assert found == [300, 301, 301, 301]


@pytest.mark.parametrize(
    ("held", "inside", "called"),
    [(18, 10_000, ["r0"]), (19, 10_000, []), (18, 353, []), (18, 354, ["r0"])],
)
def test_a_ceiling_takes_no_room_that_is_needed(
    held: int, inside: int, called: list[str]
) -> None:
    """A window for its event would have a request preempted that fits to its end.

    Nor is it cut where an event inside its prompt begins to read queries before.
    """
    found: list[str] = []
    state = SimpleNamespace(
        plan=SimpleNamespace(ceiling=256),
        call=None,
        ceiling_event=348,
        next_event=lambda position: inside,
        footprint=SimpleNamespace(window_tokens=5),
    )
    request = SimpleNamespace(num_computed_tokens=342, num_tokens=343)
    engine = SimpleNamespace(
        planner=SimpleNamespace(states={"r0": state}),
        running={"r0": request},
        last={"r0": 349},
    )
    pressure: Any = SimpleNamespace(
        engine=engine,
        room=lambda: 18,
        _effect=7,
        _most=lambda last, coming: held,
        _have=lambda name, call, cause: found.append(name),
    )
    Pressure._cut_to_ceilings(pressure)
    assert found == called


@pytest.mark.parametrize(
    ("other", "deeper"), [(-1, ["due"]), (-3, ["due"]), (4, []), (None, ["due"])]
)
def test_an_urgent_event_is_no_deeper_while_others_can_be_cut(
    other: int | None, deeper: list[str]
) -> None:
    """Priorities may be negative; a larger one is less urgent."""
    fields = {"floor": 96, "local": 44, "whole": 9}
    due = {"position": 300, "held": 300, "spacing": 32, "is_called": True}
    rows = [Row("due", -1, **due, **fields)]
    if other is not None:
        later = {"position": 340, "held": 300, "spacing": 32, "wait": 40}
        rows.append(Row("later", other, **later, **fields))
    cut: list[str] = []
    state = SimpleNamespace(call=Call(300, 300), spacing=32)
    engine = SimpleNamespace(
        planner=SimpleNamespace(
            states={"due": state}, limits=SimpleNamespace(block_size=SIZE)
        ),
        running={"due": SimpleNamespace(num_computed_tokens=300)},
    )
    pressure: Any = SimpleNamespace(
        engine=engine,
        lead_steps=1,
        _most=lambda last, coming: 60,
        _rows=lambda: rows,
        _have=lambda name, call, cause: cut.append(name),
    )
    Pressure._deepen(pressure, 50, np.zeros(1, np.int64))
    assert cut == deeper


def test_one_that_is_called_may_be_cut_deeper_without_a_further_window() -> None:
    """Others need the smallest of theirs; who keeps its own events is not called."""
    sizes = {"r0": 8, "r1": 3, "r2": 0}
    states = {
        name: SimpleNamespace(
            plan=SimpleNamespace(is_called=bool(blocks)),
            footprint=SimpleNamespace(window_blocks=blocks),
            call=None,
        )
        for name, blocks in sizes.items()
    }
    planner = SimpleNamespace(states=states)
    engine = SimpleNamespace(planner=planner, running=dict.fromkeys(sizes))
    pressure: Any = SimpleNamespace(engine=engine)
    assert Pressure._least_window(pressure) == 3
    states["r0"].call = Call(110, 96)
    assert Pressure._least_window(pressure) == 0


def test_windows_are_reserved_again_when_called_ones_close() -> None:
    """Two are open half of the time; one has been called for, three steps from now."""
    state = SimpleNamespace(call=Call(110, 96))
    engine = SimpleNamespace(
        planner=SimpleNamespace(states={"r0": state}),
        running={"r0": SimpleNamespace(num_computed_tokens=107)},
    )
    pressure: Any = SimpleNamespace(
        engine=engine,
        _windows={"r0": (0.5, 2), "r1": (0.5, 2)},
        _wanted=None,
        _called={"r0": 2},
    )
    assert Pressure.reserve(pressure, 5).tolist() == [0, 0, 0, 2, 2, 2]
    state.call = None
    assert Pressure.reserve(pressure, 1).tolist() == [2, 2] and not pressure._called


def is_equal(name: str) -> bool:
    """Return whether a policy for users has heads of equal length and no other file."""
    info = parse(name)
    needs_file = name.endswith(("-triattention", "-qfilter"))
    return not (info.is_test or needs_file or info.is_ragged({}))


def test_bookings_are_those_of_what_has_been_computed(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of requests that have sat a step out, before the next calls."""
    waits = []

    def check(entry: Entry, waiting: Any) -> None:
        stock(entry, waiting)
        waits.append(entry.num_waits)
        for name, booking in entry.forecast.bookings.items():
            computed = entry.running[name].num_computed_tokens
            if booking.offset is not None:
                assert computed - entry.forecast.step == booking.offset, name

    stock = Entry.foresee
    monkeypatch.setattr(Entry, "foresee", check)
    policy = {**MIX.policy, "budget": 256, "interval": 128}
    scenario = replace(MIX, policy=policy, pool=160, max_num_seqs=16, longest=900)
    serve(scenario, model_config, [200] * 16, [600] * 16)
    assert waits[-1] > 10


def test_drafts_may_lie_before_a_called_event() -> None:
    footprint = Footprint(EventPlan(100, 64, 32, 4096), recent=8, block_size=16)
    for num_drafts in (0, 4):
        plan = RequestPlan("tova", footprint, 4, num_drafts=num_drafts, is_called=True)
        assert RequestState(plan, computed=200).soonest_call == 200 + num_drafts


def test_answers_of_unknown_length_are_cut(model_config: ModelConfig) -> None:
    """They are not taken to end where few answers say how long they are."""
    policy = {**MIX.policy, "policy": "ams-expected", "interval": 128}
    scenario = replace(MIX, policy=policy, pool=90)
    run = serve(scenario, model_config, PROMPTS, [300] * 8, may_stop=True)
    lengths = {f"r{number}": length for number, length in enumerate(PROMPTS)}
    assert run.preemptions == 0
    assert sum(position > lengths[name] for name, position, _ in run.events) >= 3


def test_others_are_cut_for_one_without_a_policy(model_config: ModelConfig) -> None:
    """Its prompt fits beside their floors; they stay in its way for 100 steps else."""
    wishes = {6: {"kv_policy": "none"}}
    prompts, answers = [150] * 6 + [200], [150] * 6 + [20]
    scenario = replace(MIX, pool=54)
    run = serve(scenario, model_config, prompts, answers, extra_args=wishes)
    assert run.events and run.preemptions == 0
    assert run.first["r6"] <= 70


def test_the_urgent_do_not_wait_for_the_floors_of_others(
    model_config: ModelConfig,
) -> None:
    """The less urgent ones leave no room for another at its floor."""
    scenario = replace(MIX, priorities=True, pool=18)
    prompts, answers = [100] * 3 + [90], [300] * 3 + [20]
    run = serve(scenario, model_config, prompts, answers, urgent={0: 0, 3: 150})
    assert run.first["r3"] <= 150 + 8
