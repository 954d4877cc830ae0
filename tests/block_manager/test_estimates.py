"""What vLLM estimates of a step's work: by tokens that are held."""

from pathlib import Path

import pytest
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from support.engine.simulator_engine import Scenario, make_scheduler

BUDGET, INTERVAL, BLOCK = 64, 32, 16
VALUES = {"budget": BUDGET, "interval": INTERVAL, "spread_events": False}
SCENARIO = Scenario(
    policy={"policy": "streaming", "recent": 16, "prefill_interval": 1024, **VALUES},
    depth=1,
    block_size=BLOCK,
    spare=1.0,
    max_num_seqs=4,
    max_batched=256,
    long_prefill=0,
    priorities=False,
    longest=600,
    arrivals=0,
    aborts=0,
    stops=0,
    seed=0,
    estimates=True,
)


def test_a_request_reads_what_it_holds(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig(str(tiny_model), skip_tokenizer_init=True, dtype="float32")
    scheduler = make_scheduler(SCENARIO, model)
    estimate, lengths = scheduler.perf_metrics.get_read_bytes_breakdown, []

    def watched(context, per_gpu):
        lengths.extend(length for _, length, _ in context.requests)
        return estimate(context, per_gpu)

    monkeypatch.setattr(scheduler.perf_metrics, "get_read_bytes_breakdown", watched)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    scheduler.add_request(Request("r", [5] * 100, params, None))
    while scheduler.has_requests():
        output = scheduler.schedule()
        result = ModelRunnerOutput(["r"], {"r": 0}, sampled_token_ids=[[5]])
        if output.total_num_scheduled_tokens:
            scheduler.update_from_output(output, result)
    scheduler.shutdown()
    assert len(lengths) == params.max_tokens
    assert lengths[0] == 100, "a prompt without an event inside"
    assert min(lengths[1:]) > BUDGET
    assert max(lengths[1:]) <= BUDGET + BLOCK + INTERVAL
