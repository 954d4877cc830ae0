"""What vLLM estimates of a step's work: by tokens that are held."""

import pytest
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from support.engine.scheduler_steps import run_step
from support.engine.simulator_engine import Scenario, make_scheduler

BUDGET, INTERVAL, BLOCK = 64, 32, 16
VALUES = {"budget": BUDGET, "interval": INTERVAL, "spread_events": False}
SCENARIO = Scenario(
    policy={"policy": "streaming", "recent": 16, "prefill_interval": 1024, **VALUES},
    block_size=BLOCK,
    estimates=True,
)


def test_a_request_reads_what_it_holds(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(SCENARIO, model_config)
    estimate, lengths = scheduler.perf_metrics.get_read_bytes_breakdown, []

    def watched(context, per_gpu):
        lengths.extend(length for _, length, _ in context.requests)
        return estimate(context, per_gpu)

    monkeypatch.setattr(scheduler.perf_metrics, "get_read_bytes_breakdown", watched)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    scheduler.add_request(Request("r", [5] * 100, params, None))
    while scheduler.has_requests():
        run_step(scheduler)
    scheduler.shutdown()
    assert len(lengths) == params.max_tokens
    assert lengths[0] == 100, "a prompt without an event inside"
    assert min(lengths[1:]) > BUDGET
    assert max(lengths[1:]) <= BUDGET + BLOCK + INTERVAL
