"""The real schedulers under random traffic on a worker that knows every slot.

Owns checked steps over random engines. That the simulation notices what it is there for
is shown by wrong messages below, and by the faults of tools/seeded_faults.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from support import sweeps
from support.engine.simulator import Simulation
from support.engine.simulator_engine import (
    RAGGED,
    Scenario,
    make_scheduler,
    random_scenario,
)
from support.engine.simulator_pages import SimulationFailure
from vllm_kvpolicy.block_manager.manager import KVPolicyManager
from vllm_kvpolicy.block_manager.scheduler import KVPolicySchedulerMixin
from vllm_kvpolicy.protocol import StepCommands

POLICIES = ("streaming", "ams-tova", "holes", *RAGGED)
if sweeps.every_name:
    POLICIES = ("tova", "identity", *POLICIES)
# Of a policy; `make test-all` tries 8 policies with both depths, for longer.
STEPS = 12_000 if sweeps.every_name else 1500
MIN_STEPS = int(os.environ.get("KVPOLICY_SIMULATION_STEPS", STEPS))
STEPS_PER_ENGINE = 600 if sweeps.every_name else 300
# Of one engine that never restarts; `make soak` takes 100,000.
AGED_STEPS = int(os.environ.get("KVPOLICY_AGED_ENGINE_STEPS", sweeps.trials(8000)))
MOST_GROWTH = 3  # entries; less than anything that is left behind makes


UNBOUNDED = ("holes", "identity", "local")  # may keep everything


def run_engines(
    policy: str,
    depth: int,
    model_config: ModelConfig,
    num_steps: int,
    at_least: dict[str, int],
    caching: bool = False,
    change: Callable[[Scenario, int], Scenario] = lambda scenario, turn: scenario,
) -> None:
    """Run random engines until enough has happened, in at most four times the steps.

    Args:
        policy, depth, model_config: of the engines.
        num_steps: of all together, at least.
        at_least: what has to happen how often in `make test-all`.
        caching: with the prefix cache.
        change: what each engine, by its turn, is different in from a random one.
    """
    totals: Counter[str] = Counter()
    at_least = floors(at_least)
    missed = list(at_least)
    while totals["steps"] < num_steps or (missed and totals["steps"] < 4 * num_steps):
        turn = totals["engines"]
        scenario = change(random_scenario(policy, depth, turn, caching), turn)
        totals += Simulation(scenario, model_config).run(STEPS_PER_ENGINE)
        totals["engines"] += 1
        missed = [key for key, least in at_least.items() if totals[key] < least]
    print(policy, "depth", depth, dict(totals))
    assert not missed, f"too little happened: {missed} in {dict(totals)}"


def floors(at_least: dict[str, int]) -> dict[str, int]:
    """Return what has to happen: in an eighth of the steps 1/20 of it, if common."""
    if sweeps.every_name:
        return at_least
    return {key: least // 20 for key, least in at_least.items() if least >= 20}


def engines(*policies: str) -> list[Any]:
    """Return policies with depths: both of each, or sync and async by turns."""
    depths = (1, 2) if sweeps.every_name else (0,)
    return [
        pytest.param(policy, at, id=f"{policy}-{('sync', 'async')[at - 1]}")
        for turn, policy in enumerate(policies)
        for at in (depth or 1 + turn % 2 for depth in depths)
    ]


def speculating(scenario: Scenario, turn: int) -> Scenario:
    """Let an engine speculate; events begin when as much is held as a step drafts.

    Two of four engines have a prefix cache. Where a step has no room for one request's
    drafts, vLLM never lets one in whose prompt the cache has but for a token.
    """
    drafts, policy = (4, 1, 3, 12, 24)[turn % 5], scenario.policy
    most = max(scenario.max_batched, 1 + drafts)
    recent = max(policy["recent"], drafts - scenario.block_size)
    budget = max(policy["budget"], policy["sinks"] + recent + scenario.block_size)
    policy = policy | {"recent": recent, "budget": budget}
    scenario = replace(scenario, max_batched=most, caching=turn % 4 < 2)
    return replace(scenario, policy=policy, drafts=drafts)


def beside_windows(scenario: Scenario, turn: int) -> Scenario:
    """Give an engine groups of layers with a sliding window."""
    return replace(
        scenario,
        windows=1 + turn % 3,
        window_tokens=(40, 2, 100, 17)[turn % 4],
        retention=(None, 0)[turn % 2] if scenario.caching else None,
        resets=0.005 * scenario.caching,
    )


@pytest.mark.parametrize(("policy", "depth"), engines(*POLICIES))
def test_random_engines(policy: str, depth: int, model_config: ModelConfig):
    at_least = {
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
    run_engines(policy, depth, model_config, MIN_STEPS, at_least)


@pytest.mark.parametrize(
    ("policy", "depth"),
    engines(*sweeps.some(("ams-tova", "tova", "holes", "hard-tova", "local"))),
)
def test_random_engines_that_share_prefixes(
    policy: str, depth: int, model_config: ModelConfig
):
    """Half as many steps; every hit is foreseen, every cached superblock compared."""
    at_least = {
        "hits": 15,
        "hit tokens": 1000,
        "shared superblocks": 50,
        "cached blocks": 15,
        "events": 100,
        "events behind pins": 20,
        "aborts": 20,
    }
    if policy not in UNBOUNDED:
        at_least["foreseen exactly"] = 1000
    run_engines(policy, depth, model_config, MIN_STEPS // 2, at_least, caching=True)


@pytest.mark.parametrize("policy", sweeps.some(POLICIES))
def test_random_engines_that_speculate(policy: str, model_config: ModelConfig):
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
    run_engines(
        policy, 1, model_config, steps, at_least, caching=True, change=speculating
    )


def beside_states(scenario: Scenario, turn: int) -> Scenario:
    """Give an engine groups of layers with a state."""
    scenario = beside_windows(scenario, turn)
    return replace(scenario, states=True, retention=None)


BESIDE = {
    beside_windows: ["ams-tova", "identity", "streaming"],
    beside_states: ["ams-tova", "identity", "adakv-snapkv"],
}


@pytest.mark.parametrize(
    ("change", "policy", "depth", "caching"),
    [
        (change, *each)
        for change, policies in BESIDE.items()
        for each in sweeps.paired(policies, [1, 2], [True, False])
    ],
)
def test_engines_beside(
    change: Any, policy: str, depth: int, caching: bool, model_config: ModelConfig
):
    """Hits are foreseen, cached superblocks compared, windows and states read."""
    least = {"events": 60, "finished": 30, "aborts": 20, "preemptions": 20}
    if caching:
        least |= {"hits": 20, "shared superblocks": 40}
    steps = MIN_STEPS // 2
    run_engines(policy, depth, model_config, steps, least, caching, change)


def on_call(scenario: Scenario, turn: int) -> Scenario:
    """Let an engine call for events; by turns it shares, speculates, has windows."""
    is_shared = turn % 2 == 1
    spare = scenario.spare + 1.5 * is_shared * bool(scenario.pins)  # for what is pinned
    scenario = replace(scenario, caching=is_shared, spare=spare)
    if turn % 6 == 2 and scenario.depth == 1:  # vLLM drafts without looking ahead
        scenario = speculating(scenario, turn)
    elif turn % 6 == 4:
        beside = beside_windows if turn % 12 == 4 else beside_states
        scenario = beside(scenario, turn)
    elif turn % 6 == 5:
        scenario = resetting(scenario, turn)
    policy = scenario.policy | {"events": "pressure"}
    if turn % 3 == 1:
        policy["ceiling"] = policy["budget"] + 3 * scenario.block_size
    return replace(scenario, policy=policy, foresees=True)


@pytest.mark.parametrize(
    ("policy", "depth"), engines("ams-tova", "streaming", "hard-tova", "adakv-snapkv")
)
def test_random_engines_under_pressure(
    policy: str, depth: int, model_config: ModelConfig
):
    """Nobody is cut below the floor, and nobody is preempted whose length is known."""
    at_least = {
        "events": 300,
        "events above the floor": 150,
        "calls": 150,
        "hits": 40,
        "finished": 100,
        "held back": 500,
        "engines with known lengths": 2,
    }
    run_engines(policy, depth, model_config, MIN_STEPS, at_least, change=on_call)


def resetting(scenario: Scenario, turn: int) -> Scenario:
    return replace(scenario, resets=0.03)


def by_priority(scenario: Scenario, turn: int) -> Scenario:
    return replace(scenario, priorities=True)


# Engines on which called events went wrong once: windows without room, prompts cut
# inside beside others, sharers that only together give anything back, requests that end
# before their event, that sit out, that hold more than was foreseen, events that give
# nothing back, ceilings and ends that left too little room, a prompt cut inside that
# found no superblock and then a longer cached prefix, one computed again that fits only
# with events in its answer, one without room for the window of an event.
ONCE_WRONG: list[tuple[str, int, int, bool, Any]] = [
    ("ams-tova", 1, 1, False, None),
    ("ams-tova", 1, 3, True, None),
    ("ams-tova", 1, 48, False, None),
    ("ams-tova", 1, 34, False, beside_states),
    ("tova", 2, 1, False, None),
    ("tova", 1, 6, True, None),
    ("tova", 2, 8, True, None),
    ("hard-tova", 2, 8, True, None),
    ("tova", 1, 0, False, speculating),
    ("streaming", 1, 6, False, beside_windows),
    ("streaming", 1, 18, False, None),
    ("streaming", 2, 4, True, resetting),
    ("adakv-snapkv", 1, 8, True, by_priority),
    ("ams-tova", 2, 13, False, on_call),
    ("ams-tova", 1, 97, False, on_call),
    ("streaming", 1, 29, False, on_call),
    ("hard-tova", 1, 30, False, on_call),
]


@pytest.mark.parametrize(("policy", "depth", "turn", "caching", "change"), ONCE_WRONG)
def test_engines_that_went_wrong_once(
    policy: str,
    depth: int,
    turn: int,
    caching: bool,
    change: Any,
    model_config: ModelConfig,
):
    scenario = random_scenario(policy, depth, turn, caching)
    if caching and scenario.pins:  # they pinned nothing, in pools without room for it
        scenario = replace(scenario, pins=0.0, spare=scenario.spare - 1.5)
    scenario = scenario if change is None else change(scenario, turn)
    values = scenario.policy | {"events": "pressure"}
    scenario = replace(scenario, policy=values, foresees=True)
    totals = Simulation(scenario, model_config).run(600)
    assert totals["calls"] + totals["events inside prompts"] > 0, totals


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


# Prompts begin alike, and every window that is computed is cached.
SHARED_WINDOWS = replace(
    AGING,
    policy=AGING.policy
    | {"policy": "ams-tova", "budget": 100, "prefill_interval": 128, "recent": 20},
    spare=1.5,
    priorities=False,
    longest=600,
    arrivals=0.5,
    aborts=0.003,
    stops=0.02,
    seed=1,
    foresees=False,
    resets=0.0,
    drafts=0,
    windows=2,
    retention=None,
)


def test_hits_that_are_cut_find_their_windows(model_config: ModelConfig):
    totals = Simulation(SHARED_WINDOWS, model_config).run(400)
    assert totals["hits"] >= 10 and totals["events"] >= 30, totals


# A request that has just got a superblock is preempted for one whose event takes that.
PREEMPTING = replace(
    AGING,
    policy=AGING.policy | {"policy": "identity", "recent": 20},
    spare=0.5,
    longest=500,
    arrivals=0.5,
    stops=0.01,
    resets=0.0,
    drafts=0,
    windows=1,
    states=True,
    retention=None,
    foresees=False,
)


@pytest.mark.parametrize(("seed", "budget"), [(14, 164), (32, 132), (50, 100)])
def test_a_new_superblock_is_zeroed_before_survivors_move_there(
    seed: int, budget: int, model_config: ModelConfig
):
    """Layers with a state have new superblocks set to zeros, after a step's events."""
    policy = PREEMPTING.policy | {"budget": budget}
    scenario = replace(PREEMPTING, policy=policy, seed=seed)
    totals = Simulation(scenario, model_config).run(600)
    assert totals["preemptions"] > 20, totals


# Two requests hold the pool when an event is due that drops less than a superblock.
FULL = replace(
    AGING,
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
    spare=0.5,
    long_prefill=48,
    priorities=False,
    longest=400,
    arrivals=0.05,
    aborts=0.05,
    stops=0.01,
    seed=18,
    caching=False,
    resets=0.0,
    drafts=24,
)


def test_nobody_waits_for_an_event_that_gives_nothing_back(model_config: ModelConfig):
    totals: Counter[str] = Counter()
    for seed in range(8, 16):
        totals += Simulation(replace(FULL, seed=seed), model_config).run(200)
    assert totals["preemptions"] and totals["events"] and totals["waits"]


@pytest.mark.parametrize("policy", sweeps.some(("hard-tova", "ams-tova", "local")))
def test_an_engine_that_speculates_does_not_age(policy: str, model_config: ModelConfig):
    """Heads of equal lengths, of their own, and an admission: nothing is left over."""
    totals, growth = age(policy, AGED_STEPS, model_config)
    print(policy, dict(totals), "entries more than at first:", growth)
    least = {"drafts": 5000, "drafts accepted": 2000, "events": 200, "finished": 30}
    least |= {"preemptions": 5, "aborts": 20, "resets": 2, "hits": 5}
    missed = [key for key, most in floors(least).items() if totals[key] < most]
    assert not missed, f"too little happened: {missed} in {dict(totals)}"
    assert growth <= MOST_GROWTH


def age(
    policy: str, num_steps: int, model_config: ModelConfig
) -> tuple[Counter[str], int]:
    """Return what has happened, and what is held more after the last of ten drains.

    The prefix cache is emptied each time.
    """
    values = AGING.policy | {"policy": policy} | RAGGED.get(policy, {})
    simulation = Simulation(replace(AGING, policy=values), model_config)
    totals = simulation.run(num_steps, num_drains=10)
    return totals, simulation.left[-1] - simulation.left[0]


def test_notices_a_scheduler_that_ages(model_config, monkeypatch):
    """An id is left of each request that is preempted."""
    stock, left = KVPolicySchedulerMixin._preempt_request, set()

    def remember(self: Any, request: Request, *args: Any, **options: Any) -> Any:
        found = stock(self, request, *args, **options)
        self.left_over = left
        left.add(request.request_id)
        return found

    monkeypatch.setattr(KVPolicySchedulerMixin, "_preempt_request", remember)
    assert age("ams-tova", 1500, model_config)[1] > MOST_GROWTH


def tova_scheduler(model_config: ModelConfig, **values: Any) -> Any:
    """Return a scheduler of `tova`, of which two requests may run."""
    policy = {"policy": "tova", "budget": 128, "interval": 64, **values}
    scenario = random_scenario("tova", 1, 0)
    scenario = replace(scenario, policy=policy, longest=400, max_num_seqs=2)
    return make_scheduler(scenario, model_config)


def first_positions(
    model_config: ModelConfig, requests: list[Request], **values: Any
) -> Any:
    """Return the position of each request's first event, from the real scheduler."""
    scheduler = tova_scheduler(model_config, **values)
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


def test_events_of_requests_that_start_together_fall_on_many_steps(model_config):
    # As in tests/test_events.py; requests count the same steps, because they start
    # together and their prompts are equally long.
    requests = [request_of(f"r{n}", [n, *range(9)]) for n in range(64)]
    found = Counter(first_positions(model_config, requests))
    assert max(found.values()) < 10 and len(found) > 32
    together = first_positions(model_config, requests, spread_events=False)
    assert set(together) == {128 + 64}


def test_the_positions_follow_from_what_a_request_asks(model_config):
    prompt = [5, 6, 7]
    same = [request_of(name, prompt) for name in ("a", "b", "c")]
    seeded = [request_of(f"s{seed}", prompt, seed) for seed in range(20)]
    again = [request_of("again", prompt, 19)]
    embedded = [request_of("e", torch.zeros(3, 8)), request_of("f", torch.ones(3, 8))]
    found = first_positions(model_config, [*same, *seeded, *again, *embedded])
    assert len(set(found[:3])) == 1
    assert len(set(found[3:23])) > 10
    assert found[22] == found[23] and found[24] == found[25]


def test_a_plan_has_the_budget_that_a_request_asks_for(model_config):
    """Without the prompt, which this policy keeps on top of it."""
    scheduler = tova_scheduler(model_config, pin="prompt")
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
def test_steps_that_defer_prompts(policy: str, depth: int, model_config: ModelConfig):
    """Requests sit out steps without our say, and start their answers later."""
    at_least = {"steps that defer prompts": 1000, "finished": 20}
    at_least["events inside prompts"] = 60

    def deferring(scenario: Scenario, turn: int) -> Scenario:
        return replace(scenario, defers=0.6)

    run_engines(policy, depth, model_config, MIN_STEPS // 2, at_least, True, deferring)


def test_nobody_overtakes_a_request_that_waits_for_room(model_config: ModelConfig):
    """vLLM 0.33 looks at the next waiting request where 0.32 ends the step."""
    scheduler = tova_scheduler(model_config)
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
def test_resets_of_running_requests(policy: str, depth: int, model_config: ModelConfig):
    """All that run are preempted, with steps and answers of theirs under way."""
    at_least = {"resets": 30, "requests reset": 50, "replayed events": 20, "hits": 20}
    if depth > 1:
        at_least["resets with steps under way"] = 20
    if policy in ("hard-tova", "local"):
        at_least["answers after a preemption"] = 20
    run_engines(policy, depth, model_config, MIN_STEPS // 2, at_least, True, resetting)


# Two engines on which every wrong message has something to break: little memory, many
# requests that grow, and windows that overlap.
TIGHT = replace(
    AGING,
    policy={**AGING.policy, "policy": "ams-tova", "budget": 300},
    depth=2,
    priorities=False,
    longest=2000,
    arrivals=0.5,
    aborts=0.003,
    caching=False,
    foresees=False,
    resets=0.0,
    drafts=0,
)
MOVING = replace(
    TIGHT, policy=TIGHT.policy | {"policy": "holes", "budget": 90}, longest=600
)


@pytest.mark.parametrize("scenario", [TIGHT, MOVING], ids=["ams-tova", "holes"])
def test_the_engines_of_the_mutations_pass_without_one(scenario, model_config):
    totals = Simulation(scenario, model_config).run(500)
    assert totals["events"] > 40 and totals["preemptions"] > 5, totals
    assert totals["replayed events"] > 2 and totals["crowded steps"] > 2, totals


def test_answers_that_never_come_do_no_harm(model_config, monkeypatch):
    """What an event leaves over then stays with its request."""
    monkeypatch.setattr(KVPolicyManager, "give_back_surplus", lambda self, used: None)
    policy = {**TIGHT.policy, "policy": "hard-tova", **RAGGED["hard-tova"]}
    scenario = replace(TIGHT, policy=policy, foresees=True)
    totals = Simulation(scenario, model_config).run(400)
    assert totals["superblocks trimmed"] == 0 and totals["events with surplus"] > 20


Tamper = Callable[[StepCommands], StepCommands]


def events(change: Callable[[Any], dict[str, Any]]) -> Tamper:
    """Return what changes fields of all events of a step."""
    return lambda commands: replace(
        commands, events=tuple(replace(e, **change(e)) for e in commands.events)
    )


def captures(change: Callable[[Any, Any], dict[str, Any]]) -> Tamper:
    """Return what changes fields of all captures of a step, given the first of them."""
    return lambda commands: replace(
        commands,
        captures=tuple(
            replace(each, **change(each, commands.captures[0]))
            for each in commands.captures
        ),
    )


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


WRONG_ORDER = events(lambda e: {"dest_blocks": e.dest_blocks[::-1]})
# Blocks are taken before they are freed; a step's last event is lost; a block of local
# tokens is called global; tokens are captured one too early; requests share a window.
WRONG_MESSAGES: list[tuple[Tamper, Scenario, str]] = [
    (WRONG_ORDER, TIGHT, "sources"),
    (WRONG_ORDER, MOVING, "sources"),
    (
        lambda commands: replace(commands, events=commands.events[::-1]),
        MOVING,
        "sources|local|strangers",
    ),
    (
        lambda commands: replace(commands, events=commands.events[:-1]),
        TIGHT,
        "event missing|moved window",
    ),
    (
        events(lambda e: {"frontier_blocks": e.frontier_blocks + 1}),
        TIGHT,
        "wrong frontier",
    ),
    (swap_requests, TIGHT, "sources|keeps"),
    (
        captures(lambda c, _: {"first_token": max(c.first_token - 1, 0)}),
        TIGHT,
        "window",
    ),
    (
        captures(lambda _, first: {"window_blocks": first.window_blocks}),
        TIGHT,
        "window",
    ),
]


@pytest.mark.parametrize(("tamper", "scenario", "message"), WRONG_MESSAGES)
def test_notices_a_wrong_message(tamper, scenario, message, model_config):
    with pytest.raises(SimulationFailure, match=message):
        Simulation(scenario, model_config, tamper).run(800)


def test_notices_events_that_travel_one_step_late(model_config):
    waiting: list[tuple[Any, ...]] = [()]

    def delay(commands: StepCommands) -> StepCommands:
        waiting.append(commands.events)
        return replace(commands, events=waiting.pop(0))

    # Of a policy without queries, whose windows would show it first.
    with pytest.raises(SimulationFailure, match="event missing"):
        Simulation(MOVING, model_config, delay).run(800)
