"""The real schedulers with groups of layers that have a sliding window, at random.

Prompts share prefixes, and a worker of integers knows what every slot has to hold. The
mutations below must make the simulation fail.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from vllm.config import ModelConfig
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from support.engine.simulator import Simulation
from support.engine.simulator_cache import CacheCheck
from support.engine.simulator_engine import Scenario, random_scenario
from support.engine.simulator_pages import Asked, SimulationFailure
from vllm_kvpolicy.block_manager import entry
from vllm_kvpolicy.block_manager.forecast import window_levels
from vllm_kvpolicy.block_manager.manager import KVPolicyManager, SlidingOffers
from vllm_kvpolicy.block_manager.planner import RequestPlan
from vllm_kvpolicy.block_manager.scheduler import KVPolicySchedulerMixin

STEPS_PER_ENGINE = 300
MIN_STEPS = 3000


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelConfig:
    """The tiny model's configuration; no weight is ever loaded."""
    return ModelConfig(
        model=str(tiny_model), skip_tokenizer_init=True, dtype="float32", seed=0
    )


LEAST = {
    "events": 60,
    "replayed events": 2,
    "finished": 30,
    "aborts": 15,
    "preemptions": 2,
}
LEAST_SHARED = {"hits": 5, "hit tokens": 150, "shared superblocks": 20, "resets": 2}


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["ams-tova", "streaming", "identity"])
@pytest.mark.parametrize("caching", [False, True], ids=["alone", "sharing"])
def test_random_engines(policy: str, depth: int, caching: bool, model: ModelConfig):
    """Every hit is foreseen, every cached superblock compared, every window read."""
    totals: Counter[str] = Counter()
    at_least = LEAST | (LEAST_SHARED if caching else {})
    missed = list(at_least)
    while totals["steps"] < (4 * MIN_STEPS if missed else MIN_STEPS):
        turn = totals["engines"]
        scenario = replace(
            random_scenario(policy, depth, turn, caching),
            windows=1 + turn % 3,
            window_tokens=(40, 2, 100, 17)[turn % 4],
            retention=(0, 0, None)[turn % 3] if caching else None,
            resets=0.005 * caching,
        )
        totals += Simulation(scenario, model).run(STEPS_PER_ENGINE)
        totals["engines"] += 1
        missed = [key for key, least in at_least.items() if totals[key] < least]
    print(policy, "depth", depth, dict(totals))
    assert not missed, f"too little happened: {missed} in {dict(totals)}"


# Prompts begin alike, and every window that is computed is cached.
SHARING = Scenario(
    policy={
        "policy": "ams-tova",
        "budget": 100,
        "interval": 40,
        "recent": 20,
        "sinks": 3,
        "prefill_interval": 128,
        "events_per_step": 3,
    },
    depth=1,
    block_size=16,
    spare=1.5,
    max_num_seqs=8,
    max_batched=300,
    long_prefill=0,
    priorities=False,
    longest=600,
    arrivals=0.5,
    aborts=0.003,
    stops=0.02,
    seed=1,
    caching=True,
    foresees=False,
    windows=2,
    retention=None,
)
# Long prompts in small chunks, and many that are preempted while they are read.
PREEMPTING = replace(
    SHARING,
    policy=SHARING.policy
    | {"policy": "streaming", "prefill_interval": "prompt", "spread_events": False},
    priorities=True,
    spare=0.3,
    long_prefill=100,
    seed=4,
)


@pytest.mark.parametrize("scenario", [SHARING, PREEMPTING])
def test_the_engines_of_the_mutations_pass_without_one(scenario, model):
    totals = Simulation(scenario, model).run(500)
    print(dict(totals))
    least = {"hits": 10, "shared superblocks": 100, "events": 40, "preemptions": 1}
    assert all(totals[key] >= most for key, most in least.items()), str(totals)


def expect_failure(model: ModelConfig, message: str, scenario: Any = SHARING) -> None:
    """Run and demand that the simulation fails with this message."""
    with pytest.raises(SimulationFailure, match=message):
        Simulation(scenario, model).run(500)


def test_notices_hits_whose_windows_are_not_cached(model, monkeypatch):
    """A hit of vLLM's that is cut: its last window lies elsewhere."""

    def cut(self: Any, request: Any, plan: Any, blocks: Any, num: int, *rest: Any):
        usable = plan.usable_hit(num)
        blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, usable)
        return blocks, usable, *rest

    monkeypatch.setattr(KVPolicySchedulerMixin, "_cut_hit", cut)
    expect_failure(model, "null block in a window")


def test_notices_windows_cached_past_the_first_event(model, monkeypatch):
    """What they hold there follows from what full attention has kept."""
    monkeypatch.setattr(
        SlidingOffers,
        "cache_blocks",
        lambda self, *args, **options: self._stock(*args, **options),
    )
    expect_failure(model, "caches past its event")
    monkeypatch.setattr(CacheCheck, "_note", note_without_looking)
    monkeypatch.setattr(CacheCheck, "_hit", lambda self, asked, tokens: ANY)
    expect_failure(model, "window of strangers|cached block")


def note_without_looking(
    self: CacheCheck, name: str, blocks: Sequence[Any], asked: Asked
) -> None:
    """Take in what a request caches, wherever its first event is."""
    NOTE(self, name, blocks, replace(asked, plan=None))


NOTE = CacheCheck._note


def test_notices_windows_left_in_the_cache_without_content(model, monkeypatch):
    """Where vLLM's priority scheduling preempts who was about to compute them."""
    monkeypatch.setattr(
        KVPolicyManager, "withdraw", lambda self, name: self.offers[0].withdraw(name)
    )
    expect_failure(model, "strangers|cached block", PREEMPTING)


def test_notices_survivors_that_are_offered_as_a_prefix(model, monkeypatch):
    def from_the_start(self: KVPolicyManager, request: Any, num: int, *args, **options):
        self.num_cached_block[request.request_id] = 0
        FullAttentionManager.cache_blocks(self, request, num, *args, **options)

    monkeypatch.setattr(KVPolicyManager, "cache_blocks", from_the_start)
    with pytest.raises((SimulationFailure, AssertionError)):
        Simulation(SHARING, model).run(500)


def test_notices_hits_across_an_event(model, monkeypatch):
    monkeypatch.setattr(RequestPlan, "usable_hit", lambda self, cached: cached)
    expect_failure(model, "hits .* instead of")
    monkeypatch.setattr(CacheCheck, "_hit", lambda self, asked, tokens: ANY)
    expect_failure(model, "into the window|past the event|before its")


def test_notices_windows_that_the_forecast_leaves_out(model, monkeypatch):
    monkeypatch.setattr(
        entry,
        "window_levels",
        lambda sizes, positions, held: window_levels(sizes, positions, held) - 1,
    )
    expect_failure(model, "foreseen", replace(SHARING, foresees=True))
