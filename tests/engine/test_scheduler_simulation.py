"""The real schedulers under random traffic on a worker that knows every slot.

Owns checked steps over random engines, and the proof that the simulation notices what
it is there for: each mutation below must make it fail.
"""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from support import sweeps
from support.engine.simulator import Simulation
from support.engine.simulator_cache import CacheCheck
from support.engine.simulator_engine import (
    RAGGED,
    Scenario,
    make_scheduler,
    random_scenario,
)
from support.engine.simulator_pages import SimulationFailure
from support.engine.simulator_worker import StorageWorker
from vllm_kvpolicy.block_manager.manager import KVPolicyManager
from vllm_kvpolicy.block_manager.planner import Planner, RequestPlan
from vllm_kvpolicy.block_manager.scheduler import KVPolicySchedulerMixin
from vllm_kvpolicy.events import Footprint
from vllm_kvpolicy.protocol import StepCommands, UsedBlocks

POLICIES = ("streaming", "tova", "ams-tova", "identity", "holes", *RAGGED)
# 8 policies x 2 depths; raise it for a longer search.
MIN_STEPS = int(os.environ.get("KVPOLICY_SIMULATION_STEPS", sweeps.trials(12_000)))
STEPS_PER_ENGINE = 600
# Of one engine that never restarts; `make soak` takes 100,000.
AGED_STEPS = int(os.environ.get("KVPOLICY_AGED_ENGINE_STEPS", sweeps.trials(8000)))
MOST_GROWTH = 3  # entries; less than anything that is left behind makes


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelConfig:
    """The tiny model's configuration; no weight is ever loaded."""
    return ModelConfig(
        model=str(tiny_model), skip_tokenizer_init=True, dtype="float32", seed=0
    )


UNBOUNDED = ("holes", "identity", "local")  # may keep everything


def run_engines(
    policy: str,
    depth: int,
    model: ModelConfig,
    num_steps: int,
    at_least: dict[str, int],
    caching: bool = False,
    drafts: tuple[int, ...] = (0,),
) -> None:
    """Run random engines until enough has happened, in at most four times the steps.

    Args:
        policy, depth, model, num_steps: of the engines, and steps of all together.
        at_least: what has to happen how often in `make test-all`.
        caching: with the prefix cache; with drafts, in every other engine.
        drafts: tokens that are speculated at most, by turns.
    """
    totals: Counter[str] = Counter()
    at_least = floors(at_least)
    missed = list(at_least)
    while totals["steps"] < num_steps or (missed and totals["steps"] < 4 * num_steps):
        turn = totals["engines"]
        scenario = random_scenario(policy, depth, turn, caching)
        scenario = with_drafts(scenario, drafts[turn % len(drafts)])
        if scenario.drafts and turn % 4 > 1:
            scenario = replace(scenario, caching=False)
        steps = STEPS_PER_ENGINE // 2 if scenario.caching else STEPS_PER_ENGINE
        totals += Simulation(scenario, model).run(steps)
        totals["engines"] += 1
        missed = [key for key, least in at_least.items() if totals[key] < least]
    print(policy, "depth", depth, dict(totals))
    assert not missed, f"too little happened: {missed} in {dict(totals)}"


def floors(at_least: dict[str, int]) -> dict[str, int]:
    """Return what has to happen: in a quarter of the steps a tenth of it, if common."""
    if sweeps.every_name:
        return at_least
    return {key: least // 10 for key, least in at_least.items() if least >= 10}


def engines(*policies: str) -> list[Any]:
    """Return policies with depths: both of each, or sync and async by turns."""
    depths = (1, 2) if sweeps.every_name else (0,)
    return [
        pytest.param(policy, at, id=f"{policy}-{('sync', 'async')[at - 1]}")
        for turn, policy in enumerate(policies)
        for at in (depth or 1 + turn % 2 for depth in depths)
    ]


def with_drafts(scenario: Scenario, drafts: int) -> Scenario:
    """Let an engine speculate; events begin when as much is held as a step drafts."""
    policy, size = scenario.policy, scenario.block_size
    recent = max(policy["recent"], drafts - size)
    budget = max(policy["budget"], policy["sinks"] + recent + size)
    policy = policy | {"recent": recent, "budget": budget}
    return replace(scenario, policy=policy, drafts=drafts)


@pytest.mark.parametrize(("policy", "depth"), engines(*POLICIES))
def test_random_engines(policy: str, depth: int, model: ModelConfig):
    at_least = {
        "engines": 8,
        "steps": 10_000,
        "tokens": 50_000,
        "incarnations": 200,
        "events": 500,
        "events inside prompts": 100,
        "replayed events": 20,
        "preemptions": 50,
        "aborts": 50,
        "finished": 100,
        "without policy": 10,
        "clips": 300,
        "sit-outs": 1,
        "crowded steps": 2,
    }
    if RAGGED.get(policy):
        at_least |= {"uneven events": 300}
    if policy == "local":  # a request that may hold all of itself waits for room
        at_least["preemptions"] = 20
    if policy not in UNBOUNDED:
        at_least |= {"foreseen exactly": 5000, "held back": 500}
    if policy not in (*UNBOUNDED, *RAGGED):
        at_least["engines with known lengths"] = 2
    if policy in ("hard-tova", "local"):
        at_least |= {
            "events with surplus": 250,
            "superblocks trimmed": 300,
            "answers in time": 200,
            "answers after another event": 10,
            "answers after a preemption": 2,
            "answers after the end": 3,
        }
    run_engines(policy, depth, model, MIN_STEPS, at_least)


@pytest.mark.parametrize(
    ("policy", "depth"),
    engines(*sweeps.some(("ams-tova", "tova", "holes", "hard-tova", "local"))),
)
def test_random_engines_that_share_prefixes(
    policy: str, depth: int, model: ModelConfig
):
    """Half as many steps; every hit is foreseen, every cached superblock compared."""
    at_least = {
        "hits": 15,
        "hit tokens": 1000,
        "shared superblocks": 50,
        "cached blocks": 15,
        "events": 100,
        "aborts": 20,
    }
    if policy not in UNBOUNDED:
        at_least["foreseen exactly"] = 1000
    run_engines(policy, depth, model, MIN_STEPS // 2, at_least, caching=True)


@pytest.mark.parametrize("policy", sweeps.some(POLICIES))
def test_random_engines_that_speculate(policy: str, model: ModelConfig):
    """How many drafts come and how many are accepted is random: 100,000 steps.

    Suffix trees draft up to 24 tokens: more than the smaller superblocks have. vLLM
    schedules asynchronously only with methods that no policy goes with.
    """
    at_least = {
        "steps": 10_000,
        "drafts": 20_000,
        "drafts accepted": 5000,
        "incarnations": 200,
        "events": 500,
        "replayed events": 10,
        "preemptions": 30,
        "preemptions with drafts": 10,
        "hits": 15,
        "aborts": 50,
        "finished": 100,
        "clips": 300,
    }
    if policy == "local":
        at_least |= {"preemptions": 10, "preemptions with drafts": 3}
    if policy not in UNBOUNDED:
        at_least["held back"] = 100
    steps = MIN_STEPS * 13 // 12
    drafts = (4, 1, 3, 12, 24)
    run_engines(policy, 1, model, steps, at_least, caching=True, drafts=drafts)


# Drafts, prefixes, aborts, stops, resets and preemptions, all on one engine.
AGING = Scenario(
    policy={
        "budget": 160,
        "interval": 40,
        "recent": 20,
        "sinks": 3,
        "prefill_interval": 64,
        "events_per_step": 3,
    },
    depth=1,
    block_size=16,
    spare=0.8,
    max_num_seqs=8,
    max_batched=300,
    long_prefill=0,
    priorities=True,
    longest=900,
    arrivals=0.3,
    aborts=0.01,
    stops=0.001,
    seed=3,
    caching=True,
    resets=0.003,
    drafts=4,
)


# Two requests hold the pool when an event is due that drops less than a superblock.
TIGHT = Scenario(
    policy={
        "policy": "streaming",
        "budget": 310,
        "interval": 32,
        "recent": 21,
        "sinks": 7,
        "prefill_interval": 32,
        "events_per_step": 3,
        "spread_events": False,
    },
    depth=1,
    block_size=16,
    spare=0.5,
    max_num_seqs=8,
    max_batched=300,
    long_prefill=48,
    priorities=False,
    longest=400,
    arrivals=0.05,
    aborts=0.05,
    stops=0.01,
    seed=1673505965,
    drafts=24,
)


def test_nobody_waits_for_an_event_that_gives_nothing_back(model: ModelConfig):
    totals = Simulation(TIGHT, model).run(400)
    assert totals["preemptions"] and totals["events"]


@pytest.mark.parametrize("policy", sweeps.some(("hard-tova", "ams-tova", "local")))
def test_an_engine_that_speculates_does_not_age(policy: str, model: ModelConfig):
    """Heads of equal lengths, of their own, and an admission: nothing is left over."""
    totals, growth = age(policy, AGED_STEPS, model)
    print(policy, dict(totals), "entries more than at first:", growth)
    least = {"drafts": 5000, "drafts accepted": 2000, "events": 200, "finished": 30}
    least |= {"preemptions": 5, "aborts": 20, "resets": 2, "hits": 5}
    missed = [key for key, most in floors(least).items() if totals[key] < most]
    assert not missed, f"too little happened: {missed} in {dict(totals)}"
    assert growth <= MOST_GROWTH


def age(policy: str, num_steps: int, model: ModelConfig) -> tuple[Counter[str], int]:
    """Return what has happened, and what is held more after the last of ten drains.

    The prefix cache is emptied each time.
    """
    values = AGING.policy | {"policy": policy} | RAGGED.get(policy, {})
    simulation = Simulation(replace(AGING, policy=values), model)
    totals = simulation.run(num_steps, num_drains=10)
    return totals, simulation.left[-1] - simulation.left[0]


@pytest.mark.parametrize("method", ["_free_request", "_preempt_request"])
def test_notices_a_scheduler_that_ages(model, monkeypatch, method: str):
    """An id is left of each request that ends, or only of those that are preempted."""
    stock, left = getattr(KVPolicySchedulerMixin, method), set()

    def remember(self: Any, request: Request, *args: Any, **options: Any) -> Any:
        found = stock(self, request, *args, **options)
        self.left_over = left
        left.add(request.request_id)
        return found

    monkeypatch.setattr(KVPolicySchedulerMixin, method, remember)
    assert age("ams-tova", 2000, model)[1] > MOST_GROWTH


def first_positions(model: ModelConfig, requests: list[Request], **values: Any) -> Any:
    """Return the position of each request's first event, from the real scheduler."""
    policy = {"policy": "tova", "budget": 128, "interval": 64, **values}
    scenario = replace(random_scenario("tova", 1, 0), policy=policy, longest=400)
    scheduler = make_scheduler(scenario, model)
    for request in requests:
        scheduler.add_request(request)
    states = scheduler.kv_policy_planner.states
    found = [states[request.request_id].plan.first_event for request in requests]
    scheduler.shutdown()
    return found


def request_of(name: str, prompt: Any, seed: int | None = None) -> Request:
    """Return a request with a prompt of token ids, or of embeddings."""
    is_ids = isinstance(prompt, list)
    return Request(
        request_id=name,
        prompt_token_ids=prompt if is_ids else None,
        prompt_embeds=None if is_ids else prompt,
        sampling_params=SamplingParams(max_tokens=100, seed=seed),
        pooling_params=None,
    )


def test_events_of_requests_that_start_together_fall_on_many_steps(model):
    # As in tests/test_events.py; requests count the same steps, because they start
    # together and their prompts are equally long.
    requests = [request_of(f"r{n}", [n, *range(9)]) for n in range(64)]
    found = Counter(first_positions(model, requests))
    assert max(found.values()) < 10 and len(found) > 32
    together = first_positions(model, requests, spread_events=False)
    assert set(together) == {128 + 64}


def test_the_positions_follow_from_what_a_request_asks(model):
    prompt = [5, 6, 7]
    same = [request_of(name, prompt) for name in ("a", "b", "c")]
    seeded = [request_of(f"s{seed}", prompt, seed) for seed in range(20)]
    again = [request_of("again", prompt, 19)]
    embedded = [request_of("e", torch.zeros(3, 8)), request_of("f", torch.ones(3, 8))]
    found = first_positions(model, [*same, *seeded, *again, *embedded])
    assert len(set(found[:3])) == 1
    assert len(set(found[3:23])) > 10
    assert found[22] == found[23] and found[24] == found[25]


def test_a_plan_has_the_budget_that_a_request_asks_for(model):
    """Without the prompt, which this policy keeps on top of it."""
    policy = {"policy": "tova", "budget": 128, "interval": 64, "protect_prompt": True}
    scenario = replace(random_scenario("tova", 1, 0), policy=policy, longest=400)
    scheduler = make_scheduler(scenario, model)
    less = request_of("less", [1, 2, 3])
    less.sampling_params.extra_args = {"kv_budget": 96, "kv_interval": 48}
    for request in (less, request_of("all", [1, 2, 3])):
        scheduler.add_request(request)
    states = scheduler.kv_policy_planner.states
    plans = [states[name].plan for name in ("less", "all")]
    scheduler.shutdown()
    assert [plan.budget for plan in plans] == [96, 128]
    assert [plan.footprint.events.budget for plan in plans] == [99, 131]
    assert [plan.footprint.events.interval for plan in plans] == [48, 64]


@pytest.mark.parametrize(
    ("policy", "depth"), engines(*sweeps.some(("ams-tova", "holes", "hard-tova")))
)
def test_steps_that_defer_prompts(policy: str, depth: int, model: ModelConfig):
    """Requests sit out steps without our say, and start their answers later."""
    totals: Counter[str] = Counter()
    while totals["steps"] < MIN_STEPS // 2 or totals["events inside prompts"] <= 2:
        assert totals["steps"] < 4 * MIN_STEPS, totals
        scenario = random_scenario(policy, depth, totals["engines"], caching=True)
        scenario = replace(scenario, defers=0.6)
        totals += Simulation(scenario, model).run(STEPS_PER_ENGINE)
        totals["engines"] += 1
    print(policy, "depth", depth, dict(totals))
    assert totals["steps that defer prompts"] > sweeps.trials(1000)
    assert totals["finished"] > sweeps.trials(20)


def test_nobody_overtakes_a_request_that_waits_for_room(model: ModelConfig):
    """vLLM 0.33 looks at the next waiting request where 0.32 ends the step."""
    policy = {"policy": "tova", "budget": 128, "interval": 64}
    scenario = replace(random_scenario("tova", 1, 0), policy=policy, longest=400)
    scheduler = make_scheduler(replace(scenario, max_num_seqs=2), model)
    first, second = (request_of(name, [1, 2, 3]) for name in "ab")
    for request in (first, second):
        scheduler.add_request(request)
    looks_at = scheduler._handle_blocked_waiting_request
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scheduler.kv_policy_entry, "admits", lambda *_: False)
        assert looks_at(first)
        assert scheduler._reserve_prefill_lookahead(first, 0, 3) == 0
        assert not looks_at(second)
        assert scheduler.schedule().total_num_scheduled_tokens == 0
    assert list(scheduler.waiting) == [first, second]
    assert looks_at(first) and looks_at(second), "the next step begins anew"
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a", "b"]
    assert scheduler._reserve_prefill_lookahead(first, 3, 0) == 0
    assert looks_at(second), "a running request that sits out lets others in"
    scheduler.shutdown()


@pytest.mark.parametrize(
    ("policy", "depth"),
    engines(*sweeps.some(("ams-tova", "holes", "local", "hard-tova"))),
)
def test_resets_of_running_requests(policy: str, depth: int, model: ModelConfig):
    """All that run are preempted, with steps and answers of theirs under way."""
    totals: Counter[str] = Counter()
    while totals["steps"] < MIN_STEPS // 2:
        scenario = random_scenario(policy, depth, totals["engines"], caching=True)
        scenario = replace(scenario, resets=0.03)
        totals += Simulation(scenario, model).run(STEPS_PER_ENGINE)
        totals["engines"] += 1
    print(policy, "depth", depth, dict(totals))
    at_least = {"resets": 30, "requests reset": 50, "replayed events": 10, "hits": 5}
    if depth > 1:
        at_least["resets with steps under way"] = 15
    if policy in ("hard-tova", "local"):
        at_least["answers after a preemption"] = 5
    missed = [k for k, least in floors(at_least).items() if totals[k] < least]
    assert not missed, f"too little happened: {missed} in {dict(totals)}"


@pytest.mark.parametrize("lost", ["restart", "serial"])
def test_notices_what_resets_leave_behind(lost: str, model, monkeypatch):
    """Here nothing but resets preempts: memory is plentiful."""
    if lost == "restart":
        monkeypatch.delattr(KVPolicySchedulerMixin, "_preempt_request")
    else:
        answers_changed(monkeypatch, believe_any_serial)
    scenario = replace(SHRINKING, resets=0.08, spare=6.0, max_num_seqs=3, seed=4)
    expect_failure(model, "global|windows left|trimmed|strangers", scenario)


# Two engines on which every mutation has something to break: little memory, many
# requests that grow, and windows that overlap.
TIGHT = Scenario(
    policy={
        "policy": "ams-tova",
        "budget": 300,
        "interval": 40,
        "recent": 20,
        "sinks": 3,
        "prefill_interval": 64,
        "events_per_step": 3,
    },
    depth=2,
    block_size=16,
    spare=0.8,
    max_num_seqs=8,
    max_batched=300,
    long_prefill=0,
    priorities=False,
    longest=2000,
    arrivals=0.5,
    aborts=0.003,
    stops=0.001,
    seed=3,
    foresees=False,
)
MOVING = replace(
    TIGHT,
    policy=TIGHT.policy | {"policy": "holes", "budget": 90},
    longest=600,
)

# Heads of their own lengths that leave surplus behind, and events so close that one may
# find fewer superblocks than it may fill.
SHRINKING = replace(
    TIGHT,
    policy=TIGHT.policy
    | {"budget": 160, "interval": 12, "recent": 9}
    | {"policy": "hard-tova", **RAGGED["hard-tova"]},
    longest=900,
    spare=0.55,
)

# Prompts begin alike, so that most events read superblocks of others.
SHARING = replace(
    TIGHT,
    policy=TIGHT.policy | {"budget": 100, "prefill_interval": 128},
    caching=True,
    spare=3.0,
    longest=600,
    stops=0.02,
)
# In the next two few coincidences are to be noticed: events stay where they make them.
# Long prompts in small chunks, and many that are preempted while they are read.
PREEMPTING = replace(
    SHARING,
    policy=SHARING.policy
    | {"policy": "streaming", "prefill_interval": "prompt", "spread_events": False},
    priorities=True,
    depth=1,
    spare=0.5,
    max_batched=300,
    long_prefill=100,
    seed=0,
)
# Without recent tokens, a superblock may leave before all its tokens are known.
OUTRUNNING = replace(
    SHARING,
    policy=SHARING.policy
    | {"policy": "identity", "recent": 0, "sinks": 0, "budget": 104}
    | {"spread_events": False},
)


@pytest.mark.parametrize(
    "scenario", [TIGHT, MOVING, SHRINKING], ids=["ams-tova", "holes", "hard-tova"]
)
def test_the_engines_of_the_mutations_pass_without_one(scenario, model):
    totals = Simulation(scenario, model).run(800)
    assert totals["events"] > 70 and totals["preemptions"] > 10, totals
    assert totals["replayed events"] > 5 and totals["crowded steps"] > 5, totals


@pytest.mark.parametrize("scenario", [SHARING, PREEMPTING, OUTRUNNING])
def test_the_engines_that_share_prefixes_pass_without_a_mutation(scenario, model):
    totals = Simulation(scenario, model).run(800)
    least = {"hits": 15, "shared superblocks": 100, "events": 40, "hit tokens": 500}
    assert all(totals[key] >= most for key, most in least.items()), str(totals)


def expect_failure(
    model: ModelConfig, message: str, scenario: Scenario = TIGHT, tamper: Any = None
) -> None:
    """Run and demand that the simulation fails with this message."""
    with pytest.raises(SimulationFailure, match=message):
        Simulation(scenario, model, tamper).run(800)


def free_one_more(manager: KVPolicyManager, owned: Any, dest: Any) -> None:
    """Give back one block of the survivors as well."""
    kept = {block.block_id for block in dest[:-1]}
    freed = [block for block in reversed(owned) if block.block_id not in kept]
    manager.block_pool.free_blocks(freed)


def test_notices_a_block_freed_too_many(model, monkeypatch):
    monkeypatch.setattr(KVPolicyManager, "_give_back", free_one_more)
    expect_failure(model, "superblocks taken|owned twice")


def test_notices_a_block_that_is_freed_while_it_is_read(model, monkeypatch):
    """Without counting, the attended slots show the new owner."""
    stock = KVPolicyManager._run_event

    def free_first_local(self: KVPolicyManager, request_id: str, state: Any) -> None:
        stock(self, request_id, state)
        blocks, first_local = self.req_to_blocks[request_id], state.frontier_blocks
        self.block_pool.free_blocks([blocks[first_local]])
        blocks[first_local] = self._null_block

    monkeypatch.setattr(KVPolicyManager, "_run_event", free_first_local)
    monkeypatch.setattr(Simulation, "_check_blocks", lambda self, output: None)
    expect_failure(model, "strangers", replace(TIGHT, depth=1))


@pytest.mark.parametrize("change", [-1, 1])
def test_notices_a_survivor_area_of_the_wrong_size(change, model, monkeypatch):
    stock = Footprint.global_blocks
    monkeypatch.setattr(
        Footprint, "global_blocks", lambda self, p: stock(self, p) + change
    )
    expect_failure(model, "keeps")


def test_notices_a_preemption_that_restarts_nothing(model, monkeypatch):
    monkeypatch.delattr(KVPolicySchedulerMixin, "_preempt_request")
    expect_failure(model, "global|holds")


def test_notices_state_left_after_the_end(model, monkeypatch):
    monkeypatch.delattr(KVPolicySchedulerMixin, "_free_request")
    expect_failure(model, "global|states left|stalled")


def test_notices_admission_that_never_lets_anyone_in(model, monkeypatch):
    monkeypatch.setattr(Planner, "peak_blocks", lambda self, *request: 10**6)
    monkeypatch.setattr(
        KVPolicyManager, "num_held", lambda self, name: -(10**6), raising=True
    )
    expect_failure(model, "stalled")


def test_notices_a_window_that_is_never_given_back(model, monkeypatch):
    stock = KVPolicyManager._run_event

    def forget(self: KVPolicyManager, request_id: str, state: Any) -> None:
        self._windows.pop(request_id, None)
        stock(self, request_id, state)

    monkeypatch.setattr(KVPolicyManager, "_run_event", forget)
    expect_failure(model, "requests hold")


def test_notices_a_window_that_ends_before_its_event(model, monkeypatch):
    stock = KVPolicyManager.allocate_new_blocks

    def too_early(self: KVPolicyManager, request_id: str, *counts: int) -> Any:
        new_blocks = stock(self, request_id, *counts)
        window = self._windows.pop(request_id, ())
        self.block_pool.free_blocks(window)
        return new_blocks

    monkeypatch.setattr(KVPolicyManager, "allocate_new_blocks", too_early)
    expect_failure(model, "window|twice|requests hold")


def test_notices_a_window_without_room(model, monkeypatch):
    stock = KVPolicyManager._taken_beside

    def forget(self: KVPolicyManager, request_id: str, num_tokens: int) -> int:
        state = self.planner.states.get(request_id)
        opens = self.planner.needs_window(request_id, num_tokens) and not state.due
        window = state.footprint.window_blocks if opens else 0
        return stock(self, request_id, num_tokens) - window

    monkeypatch.setattr(KVPolicyManager, "_taken_beside", forget)
    with pytest.raises(ValueError, match="free blocks from the pool"):
        Simulation(replace(TIGHT, spare=0.0), model).run(800)


def answers_changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the planner hear something else than workers answered."""
    stock = Planner.surplus

    def changed(self: Planner, used: UsedBlocks) -> Any:
        return stock(self, change(self, used))

    monkeypatch.setattr(Planner, "surplus", changed)


def test_notices_surplus_that_is_trimmed_too_far(model, monkeypatch):
    answers_changed(
        monkeypatch,
        lambda planner, used: replace(used, num_blocks=max(used.num_blocks - 1, 0)),
    )
    expect_failure(model, "trimmed|strangers", SHRINKING)


def believe_any_serial(planner: Planner, used: UsedBlocks) -> UsedBlocks:
    """Take an answer for one about the last event, of whichever life."""
    state = planner.states.get(used.request_id)
    return replace(used, serial=state.serial) if state else used


def test_notices_answers_to_events_long_gone(model, monkeypatch):
    answers_changed(monkeypatch, believe_any_serial)
    expect_failure(model, "trimmed|strangers", SHRINKING)


def test_notices_surplus_that_stays_in_the_list(model, monkeypatch):
    def keep(self: KVPolicyManager, used: UsedBlocks) -> None:
        surplus = self.planner.surplus(used)
        if surplus is not None:
            blocks = self.req_to_blocks[used.request_id]
            self._give_back(blocks[slice(*surplus)], ())

    monkeypatch.setattr(KVPolicyManager, "give_back_surplus", keep)
    expect_failure(model, "holds|owned twice", SHRINKING)


def free_used_ones(self: KVPolicyManager, used: UsedBlocks) -> None:
    """Free as many superblocks as are left over, but the first ones."""
    surplus = self.planner.surplus(used)
    if surplus is not None:
        first, last = surplus
        blocks = self.req_to_blocks[used.request_id]
        self._give_back(blocks[: last - first], ())
        blocks[:last] = blocks[last - first : last] + [self._null_block] * (
            last - first
        )


def test_notices_the_wrong_superblocks_given_back(model, monkeypatch):
    monkeypatch.setattr(KVPolicyManager, "give_back_surplus", free_used_ones)
    expect_failure(model, "sources|strangers", SHRINKING)


def test_answers_that_never_come_do_no_harm(model, monkeypatch):
    monkeypatch.setattr(KVPolicyManager, "give_back_surplus", lambda self, used: None)
    totals = Simulation(SHRINKING, model).run(800)
    assert totals["superblocks trimmed"] == 0 and totals["events with surplus"] > 70


def reverse_destinations(commands: StepCommands) -> StepCommands:
    """Name the right destinations in the wrong order."""
    events = [replace(e, dest_blocks=e.dest_blocks[::-1]) for e in commands.events]
    return replace(commands, events=tuple(events))


def reverse_events(commands: StepCommands) -> StepCommands:
    """Take blocks before they are freed."""
    return replace(commands, events=commands.events[::-1])


def drop_an_event(commands: StepCommands) -> StepCommands:
    """Lose the step's last event."""
    return replace(commands, events=commands.events[:-1])


def move_frontier(commands: StepCommands) -> StepCommands:
    """Call one block of local tokens global."""
    events = [
        replace(e, frontier_blocks=e.frontier_blocks + 1) for e in commands.events
    ]
    return replace(commands, events=tuple(events))


def swap_requests(commands: StepCommands) -> StepCommands:
    """Give two requests each other's blocks."""
    if len(commands.events) < 2:
        return commands
    one, two, *rest = commands.events
    swapped = (
        replace(one, source_blocks=two.source_blocks, dest_blocks=two.dest_blocks),
        replace(two, source_blocks=one.source_blocks, dest_blocks=one.dest_blocks),
    )
    return replace(commands, events=(*swapped, *rest))


def shift_windows(commands: StepCommands) -> StepCommands:
    """Capture one token too early wherever there is one."""
    captures = [
        replace(c, first_token=max(c.first_token - 1, 0)) for c in commands.captures
    ]
    return replace(commands, captures=tuple(captures))


def share_a_window(commands: StepCommands) -> StepCommands:
    """Let all requests write the same window."""
    captures = [
        replace(c, window_blocks=commands.captures[0].window_blocks)
        for c in commands.captures
    ]
    return replace(commands, captures=tuple(captures))


@pytest.mark.parametrize(
    "tamper, scenario, message",
    [
        (reverse_destinations, TIGHT, "sources"),
        (reverse_destinations, MOVING, "sources"),
        (reverse_events, MOVING, "sources|local|strangers"),
        (drop_an_event, TIGHT, "event missing|moved window"),
        (move_frontier, TIGHT, "wrong frontier"),
        (swap_requests, TIGHT, "sources|keeps"),
        (shift_windows, TIGHT, "window"),
        (share_a_window, TIGHT, "window"),
    ],
)
def test_notices_a_wrong_message(tamper, scenario, message, model):
    expect_failure(model, message, scenario, tamper)


def test_notices_events_that_travel_one_step_late(model):
    waiting: list[tuple[Any, ...]] = [()]

    def delay(commands: StepCommands) -> StepCommands:
        waiting.append(commands.events)
        return replace(commands, events=waiting.pop(0))

    # Of a policy without queries, whose windows would show it first.
    expect_failure(model, "event missing", MOVING, delay)


def test_notices_a_late_event_even_if_nobody_counts_positions(model, monkeypatch):
    """The blocks may have a new owner by then: the storage alone shows it."""
    monkeypatch.setattr(StorageWorker, "_check_positions", lambda *args: None)
    waiting: list[tuple[Any, ...]] = [()]

    def delay(commands: StepCommands) -> StepCommands:
        waiting.append(commands.events)
        return replace(commands, events=waiting.pop(0))

    expect_failure(model, "null block|strangers|position|no room", MOVING, delay)


# -- the prefix cache ---------------------------------------------------------------


def test_notices_superblocks_cached_past_the_first_event(model, monkeypatch):
    def one_more(self: KVPolicyManager, request: Any, num_tokens: int, **rest: Any):
        FullAttentionManager.cache_blocks(self, request, num_tokens, **rest)

    monkeypatch.setattr(
        KVPolicyManager,
        "cache_blocks",
        lambda self, request, num_tokens, retention_interval=None, **rest: one_more(
            self, request, num_tokens, **rest
        ),
    )
    expect_failure(model, "caches past its event|cached block", SHARING)


def test_notices_an_event_that_writes_into_shared_superblocks(model, monkeypatch):
    monkeypatch.setattr(BlockPool, "is_block_writable", lambda self, block: True)
    expect_failure(model, "moves into a shared block", SHARING)


def test_notices_an_event_that_writes_into_cached_superblocks(model, monkeypatch):
    monkeypatch.setattr(
        BlockPool, "is_block_writable", lambda self, block: block.ref_cnt == 1
    )
    expect_failure(model, "moves into a shared block", SHARING)


def test_notices_what_is_written_if_nobody_looks_at_the_message(model, monkeypatch):
    """The content of the cache alone shows it."""
    monkeypatch.setattr(BlockPool, "is_block_writable", lambda self, block: True)
    monkeypatch.setattr(CacheCheck, "check", lambda self, *args: self.cached_ids())
    expect_failure(model, "strangers|cached block", replace(SHARING, depth=1))


def test_notices_hits_that_reach_past_the_event(model, monkeypatch):
    monkeypatch.setattr(RequestPlan, "usable_hit", lambda self, cached: cached)
    expect_failure(model, "hits .* instead of", SHARING)
    monkeypatch.setattr(CacheCheck, "_hit", lambda self, asked, tokens: ANY)
    expect_failure(model, "into the window|past the event|before its", SHARING)


def test_notices_hits_that_leave_no_queries_for_the_event(model, monkeypatch):
    def up_to_the_event(self: RequestPlan, cached: int) -> int:
        size = self.footprint.block_size
        return min((self.first_event - 1) // size * size, cached)

    monkeypatch.setattr(RequestPlan, "usable_hit", up_to_the_event)
    expect_failure(model, "hits .* instead of", SHARING)
    monkeypatch.setattr(CacheCheck, "_hit", lambda self, asked, tokens: ANY)
    expect_failure(model, "reaches into the window|window", SHARING)


def test_notices_prefixes_that_are_cached_and_not_found(model, monkeypatch):
    stock = RequestPlan.usable_hit
    monkeypatch.setattr(
        RequestPlan,
        "usable_hit",
        lambda self, cached: stock(self, max(cached - 16, 0)),
    )
    expect_failure(model, "hits .* instead of", SHARING)


def test_notices_superblocks_left_in_the_cache_without_content(model, monkeypatch):
    """vLLM's own priority scheduling leaves them there."""
    monkeypatch.setattr(KVPolicyManager, "withdraw", lambda self, name: None)
    expect_failure(model, "strangers|cached block", PREEMPTING)


def test_notices_survivors_that_are_offered_as_a_prefix(model, monkeypatch):
    stock = KVPolicyManager._run_event

    def forget(self: KVPolicyManager, request_id: str, state: Any) -> None:
        before = self.num_cached_block[request_id]
        stock(self, request_id, state)
        self.num_cached_block[request_id] = before

    monkeypatch.setattr(KVPolicyManager, "_run_event", forget)
    expect_failure(model, "cached block|strangers|shared", OUTRUNNING)


def test_notices_salts_that_are_ignored(model, monkeypatch):
    monkeypatch.setattr(
        kv_cache_utils, "generate_block_hash_extra_keys", lambda *args: (None, 0)
    )
    expect_failure(model, "hits .* instead of|strangers|cached block", SHARING)
