"""Admission where answers have no known length, and where priorities differ.

The real scheduler, without a model: answers stop where the test says.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from support.engine.scheduler_steps import run_step, sampled
from support.engine.simulator_engine import Scenario, make_scheduler
from vllm_kvpolicy.block_manager.output_lengths import LOOKAHEAD

TOKEN, STOP_TOKEN = 5, 7
# A step costs about as much as ten tokens more in it, by which steps are weighed.
STEP_TOKENS = 10
CHAT = Scenario(
    policy={"policy": "tova", "budget": 512, "interval": 128, "prefill_interval": 1024},
    max_num_seqs=128,
    max_batched=2048,
    longest=16_000,
)


@dataclass
class Traffic:
    """Requests whose answers stop where they are told to.

    Attributes:
        stops: length of each answer, by request.
        steps, tokens: so far, tokens of prompts included.
        sat_out: steps in which a request that ran computed nothing, by request.
    """

    scheduler: Any
    stops: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    sat_out: dict[str, int] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """Time that it took, in tokens."""
        return self.steps * STEP_TOKENS + self.tokens

    @property
    def counted(self) -> dict[str, float]:
        return self.scheduler.kv_policy_counters.read()

    @property
    def num_preemptions(self) -> float:
        counted = self.counted
        return counted["preemptions_bounded"] + counted["preemptions_unbounded"]

    def add(
        self,
        length: int,
        priority: int = 0,
        prompt_len: int = 100,
        least: int = 0,
        **wishes: Any,
    ) -> str:
        name = f"r{len(self.stops)}"
        rng = random.Random(name)
        params = SamplingParams(
            max_tokens=8000,
            min_tokens=least,
            stop_token_ids=[STOP_TOKEN],
            extra_args=wishes or None,
        )
        prompt = [rng.randrange(10, 90) for _ in range(prompt_len)]
        request = Request(name, prompt, params, None, priority=priority)
        self.stops[name] = length
        self.scheduler.add_request(request)
        return name

    def step(self) -> None:
        scheduler = self.scheduler
        ran = {request.request_id for request in scheduler.running}
        output = run_step(scheduler, self._sampled)
        ran &= {request.request_id for request in scheduler.running}
        for name in ran - output.num_scheduled_tokens.keys():
            self.sat_out[name] = self.sat_out.get(name, 0) + 1
        self.steps += 1
        self.tokens += output.total_num_scheduled_tokens

    def _sampled(self, request: Request) -> list[int]:
        is_last = request.num_output_tokens + 1 >= self.stops[request.request_id]
        return sampled(request, STOP_TOKEN if is_last else TOKEN)

    def finish(self) -> None:
        while self.scheduler.has_requests():
            self.step()
            assert self.steps < 20_000
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        self.scheduler.shutdown()


def traffic(model_config: ModelConfig, pool: int, **changes: Any) -> Traffic:
    """Return an engine with a pool of so many superblocks."""
    return Traffic(make_scheduler(replace(CHAT, pool=pool, **changes), model_config))


def as_vllm_does(engine: Traffic) -> Traffic:
    admission = engine.scheduler.kv_policy_entry
    admission.admits = lambda request, computed, num_new, *_: num_new
    admission.allowed = lambda *given: given[2]
    return engine


def cost_of(engine: Traffic, lengths: list[int], every: int = 0) -> int:
    """Serve answers of these lengths, one every few steps or all at once."""
    for length in lengths:
        engine.add(length)
        for _ in range(every):
            engine.step()
    engine.finish()
    return engine.cost


@pytest.mark.parametrize("kind", ["cold", "longer than known", "heavy tail"])
def test_wrong_ideas_of_lengths_cost_no_more_than_vllms_rule(
    model_config: ModelConfig, kind: str
) -> None:
    """Nothing is known, or what is known is wrong, or few answers are very long."""
    rng = random.Random(kind)
    if kind == "cold":
        lengths = [rng.randint(200, 400) for _ in range(48)]
    elif kind == "longer than known":
        lengths = [20] * 60 + [1500] * 40
    else:
        lengths = [1000 if n % 12 == 0 else rng.randint(30, 90) for n in range(120)]
    every = 0 if kind == "cold" else 3
    pool = 700 if kind == "longer than known" else 350
    ours = traffic(model_config, pool=pool)
    stock = as_vllm_does(traffic(model_config, pool=pool))
    costs = cost_of(ours, lengths, every), cost_of(stock, lengths, every)
    assert costs[0] <= 1.1 * costs[1], (kind, costs, ours.steps, stock.steps)


def test_lengths_that_are_known_by_now_save_preemptions(
    model_config: ModelConfig,
) -> None:
    """Those that are left are cheaper than to wait: vLLM's rule takes longer."""
    preemptions, costs = [], []
    for prepare in (lambda engine: engine, as_vllm_does):
        engine, rng = prepare(traffic(model_config, pool=300)), random.Random(8)
        for count in (40, 36):
            before = engine.num_preemptions, engine.cost
            for _ in range(count):
                engine.add(rng.randint(300, 500))
            while engine.scheduler.has_requests():
                engine.step()
        preemptions.append(engine.num_preemptions - before[0])
        costs.append(engine.cost - before[1])
        engine.finish()
    assert preemptions[0] < 0.5 * preemptions[1] and costs[0] < 0.9 * costs[1]


def test_an_answer_is_at_least_as_long_as_its_request_says(
    model_config: ModelConfig,
) -> None:
    """Short answers are all that is known; requests of `min_tokens` are no such."""
    policy = {"policy": "tova", "budget": 4096, "interval": 128}
    engine = traffic(model_config, pool=400, policy=policy)
    for _ in range(20):
        engine.add(8)
    while engine.scheduler.has_requests():
        engine.step()
    for _ in range(10):  # their prompts are too dear to be computed again
        engine.add(400, prompt_len=900, least=400)
    engine.finish()
    assert engine.counted["preemptions_bounded"] == 0 and not engine.sat_out


def test_a_prompt_in_several_steps_is_booked_with_its_answer(
    model_config: ModelConfig,
) -> None:
    engine = traffic(model_config, pool=100, max_batched=64, max_num_seqs=64)
    name = engine.add(300, prompt_len=200, least=300)
    engine.step()
    levels = engine.scheduler.kv_policy_entry.forecast.bookings[name].levels.tolist()
    # Of 200 tokens four steps, and one for each token of the answer but the last.
    assert levels == [13] * 4 + [-(-tokens // 16) for tokens in range(201, 500)]
    engine.finish()


def test_a_request_of_a_higher_priority_sits_out_for_nobody(
    model_config: ModelConfig,
) -> None:
    engine = traffic(model_config, pool=400, priorities=True)
    for _ in range(40):
        engine.add(900, priority=5)
    for _ in range(20):
        engine.step()
    first = engine.add(900, priority=0)
    engine.finish()
    assert sum(engine.sat_out.values()) > 100
    # vLLM ends a step with a request that it preempts in its own turn.
    assert engine.sat_out.get(first, 0) <= 1


# Four requests fill a pool of 60 superblocks; the forecast has no room for more.
FULL = {
    "pool": 60,
    "priorities": True,
    "policy": {"policy": "tova", "budget": 192, "interval": 32},
}


def wait_of(engine: Traffic, crowd: int, prompt_len: int, **wishes: Any) -> int:
    """Return the steps to the first token of a request that comes to less urgent ones.

    All are served to the end, it without an interruption.
    """
    for _ in range(crowd):
        engine.add(300, priority=5)
    for _ in range(60):
        engine.step()
    urgent = engine.scheduler.requests[engine.add(40, 0, prompt_len, **wishes)]
    came = engine.steps
    while not urgent.num_output_tokens:
        engine.step()
    wait = engine.steps - came
    engine.finish()
    assert not urgent.num_preemptions
    return wait


@pytest.mark.parametrize(("crowd", "prompt_len", "steps"), [(4, 64, 1), (8, 400, 3)])
@pytest.mark.parametrize("wishes", [{}, {"kv_policy": "none"}], ids=["bounded", "none"])
def test_an_urgent_request_does_not_wait_for_less_urgent_ones(
    model_config: ModelConfig,
    crowd: int,
    prompt_len: int,
    steps: int,
    wishes: Any,
) -> None:
    """For the short prompt there is room in the pool, for the long one there is none.

    It takes a step to see that, one to preempt, and the next computes the prompt. The
    others are preempted no more often than where vLLM lets requests in.
    """
    ours = traffic(model_config, **FULL)
    stock = as_vllm_does(traffic(model_config, **FULL))
    waits = [wait_of(each, crowd, prompt_len, **wishes) for each in (ours, stock)]
    assert waits[0] == steps, waits
    assert ours.num_preemptions <= stock.num_preemptions
    assert ours.steps <= 1.1 * stock.steps


def crowd_and_one_that_takes_the_pool(engine: Traffic) -> Request:
    """Run less urgent requests, and add a more urgent one that fits only alone."""
    for _ in range(4):
        engine.add(300, priority=5)
    for _ in range(60):
        engine.step()
    manager = engine.scheduler.kv_policy_manager
    room = (manager.num_usable - 1) * manager.block_size
    name = engine.add(9, 0, room, kv_policy="none")
    return engine.scheduler.requests[name]


def test_a_watermark_keeps_nobody_out_who_fits_alone(model_config: ModelConfig) -> None:
    """vLLM waives it where nobody else runs."""
    engine = traffic(model_config, **FULL)
    cache_manager = engine.scheduler.kv_cache_manager
    cache_manager.watermark_blocks = 5
    engine.scheduler.kv_policy_entry.watermark = 5
    urgent, came = crowd_and_one_that_takes_the_pool(engine), engine.steps
    while not urgent.num_output_tokens:
        engine.step()
    assert engine.steps - came <= 4
    engine.finish()


def test_nobody_makes_way_while_nobody_is_let_in(model_config: ModelConfig) -> None:
    engine = traffic(model_config, **FULL)
    urgent = crowd_and_one_that_takes_the_pool(engine)
    while engine.scheduler.kv_policy_entry.claim is None:
        engine.step()
    before = engine.num_preemptions
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(40):
        engine.step()
    assert engine.num_preemptions == before and not urgent.num_computed_tokens
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.finish()


def test_answers_that_outlive_what_was_expected_do_not_wait_for_each_other(
    model_config: ModelConfig,
) -> None:
    """Two take the whole pool at the length where both were expected to end."""
    engine = traffic(model_config, pool=2 * 19)
    for _ in range(2):
        engine.add(length=300, prompt_len=19 * 16 - LOOKAHEAD + 1)
    while engine.scheduler.has_unfinished_requests():
        before = engine.tokens
        engine.step()
        assert engine.tokens > before, engine.steps
    assert engine.num_preemptions == 1
    engine.scheduler.shutdown()
