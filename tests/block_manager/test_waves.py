"""Requests that start together: no waves, and no gap longer than two steps.

The planner decides, with the limits that an engine gives it; the cost of a step and of
an event are those of an 8B model on a GPU, by estimate.
"""

import random
from types import SimpleNamespace

import pytest

from vllm_kvpolicy.block_manager.planner import Planner, RequestPlan
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.events import request_phase
from vllm_kvpolicy.sizes import planner_limits

BLOCK, STEP_TOKENS, GROUP_SIZE = 16, 16_384, 4
STEP_MS, REQUEST_MS, PROMPT_TOKEN_MS = 3.8, 0.05, 0.027
EVENTS_MS, EVENT_MS = 0.8, 0.44


class Traffic:
    """Equal requests that arrive at once, with prompts of their own.

    Attributes:
        computed: tokens of each request.
        steps: taken so far.
        gaps: milliseconds between tokens of a request, once no prompt is computed.
    """

    def __init__(self, requests: int, prompt: int, output: int, **config: int) -> None:
        settings = KVPolicyConfig.from_dict({"policy": "ams-tova", **config})
        engine = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            parallel_config=None,
            model_config=SimpleNamespace(
                hf_text_config=None,
                model_arch_config=SimpleNamespace(head_size=128),
                use_mla=False,
                get_num_kv_heads=lambda *_: 8,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=requests, max_num_batched_tokens=STEP_TOKENS
            ),
        )
        self.planner = Planner(planner_limits(engine, settings))
        self.prompt, self.last = prompt, prompt + output
        self.computed = {f"r{number}": 0 for number in range(requests)}
        rng = random.Random(requests)
        for name in self.computed:
            phase = request_phase([rng.randrange(50_000) for _ in range(prompt)])
            footprint = settings.footprint(prompt, BLOCK, GROUP_SIZE, phase)
            self.planner.add(name, RequestPlan("ams-tova", footprint, sinks=4))
        self.steps, self.now, self.gaps = 0, 0.0, []
        self.newest: dict[str, float] = {}

    def run(self) -> None:
        while self.computed:
            self.step()

    def step(self) -> None:
        left, counts, events = STEP_TOKENS, {}, 0
        for name, computed in self.computed.items():
            wanted = min(max(self.prompt - computed, 1), left)
            count = self.planner.clip(name, computed, wanted) if wanted else 0
            if not count:
                continue
            state = self.planner.due(name)
            if state is not None:
                self.planner.record(name, (1, 2), (1,), ())
                events += 1
            counts[name] = count
            left -= count
        self.planner.finish_step(counts)
        num_prompt = STEP_TOKENS - left - len(counts)
        self.steps += 1
        self.now += STEP_MS + REQUEST_MS * len(counts) + PROMPT_TOKEN_MS * num_prompt
        self.now += (EVENTS_MS + EVENT_MS * events) * bool(events)
        is_decoding = min(self.computed.values()) >= self.prompt
        for name, count in counts.items():
            self.computed[name] += count
            if self.computed[name] < self.prompt:
                continue
            if is_decoding and name in self.newest:
                self.gaps.append(self.now - self.newest[name])
            if is_decoding:
                self.newest[name] = self.now
            if self.computed[name] == self.last:
                del self.computed[name]
                self.planner.remove(name)


@pytest.mark.parametrize(
    "requests, prompt, output, budget, interval",
    [
        (8, 200, 1024, 256, 128),
        (64, 1600, 1024, 1024, 512),
        (80, 200, 1200, 1024, 128),
        (192, 700, 600, 256, 128),
        (256, 200, 1400, 1024, 512),
    ],
)
def test_equal_requests_go_through_together(requests, prompt, output, budget, interval):
    traffic = Traffic(requests, prompt, output, budget=budget, interval=interval)
    traffic.run()
    # The step that completes a prompt gives the first token.
    ideal = output + -(-requests * prompt // STEP_TOKENS)
    assert traffic.steps <= 1.02 * ideal
    gaps = sorted(traffic.gaps)
    one_event = EVENTS_MS + EVENT_MS
    assert gaps[-1] <= 2 * gaps[len(gaps) // 2] + one_event
