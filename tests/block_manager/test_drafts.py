"""The least budget beside drafts: vLLM's padding must end by the first event."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from support.engine.scheduler_steps import run_step
from support.engine.simulator_engine import Scenario, make_scheduler
from vllm_kvpolicy.api.request_guards import check_params
from vllm_kvpolicy.block_manager import scheduler as scheduler_module
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.sizes import check_drafts

DRAFTS = 24
VALUES = {"interval": 8, "recent": 0, "sinks": 0, "prefill_interval": 64}
LATEST = {"spread_events": False}


def engine(
    model_config: ModelConfig, policy: str = "tova", spare: float = 8.0, **values: Any
) -> Any:
    """Return a scheduler with superblocks of 16 tokens and up to 24 drafts."""
    scenario = Scenario(
        policy={**VALUES, "policy": policy, "budget": DRAFTS, **values},
        spare=spare,
        drafts=DRAFTS,
    )
    return make_scheduler(scenario, model_config)


def pad(scheduler: Any, **extra_args: Any) -> Any:
    """Let a prompt of one token begin beside a request that generates."""
    for name, length, asked in (("first", 10, {}), ("one", 1, extra_args)):
        params = SamplingParams(
            max_tokens=60, ignore_eos=True, extra_args={**asked} or None
        )
        prompt = [5] * length
        request = Request(name, prompt, sampling_params=params, pooling_params=None)
        scheduler.add_request(request)
        output = run_step(scheduler)  # no draft is right
    return output


@pytest.mark.parametrize(
    "values", [{}, {"policy": "local", "recent": 8}, LATEST], ids=str
)
def test_padding_fits_before_the_first_event(
    model_config: ModelConfig, values: Any
) -> None:
    output = pad(engine(model_config, **values))
    assert output.num_scheduled_tokens["one"] == 1 + DRAFTS
    assert output.scheduled_spec_decode_tokens["one"] == [-1] * DRAFTS


def test_a_request_that_asks_for_less_keeps_the_servers(
    model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came by a door without checks; vLLM's scheduler would end the engine."""
    scheduler = engine(model_config)
    output = pad(scheduler, kv_budget=17)
    assert output.num_scheduled_tokens["one"] == 1 + DRAFTS
    assert scheduler.kv_policy_planner.states["one"].plan.budget == DRAFTS
    monkeypatch.setattr(scheduler_module, "check_drafts", lambda *given: None)
    with pytest.raises(AssertionError):
        pad(engine(model_config), kv_budget=17)


Values = dict[str, Any]
TOO_SMALL: list[tuple[Values, str]] = [
    ({"policy": "tova", "budget": 23}, "budget: got 23, expected at least 24"),
    (
        {"policy": "local", "recent": 5, "sinks": 2},
        "recent: got 5, expected at least 6",
    ),
    # The prompt has a token at least, which counts on top.
    (
        {"policy": "tova", "budget": 22, "pin": "prompt"},
        "budget: got 22, expected at least 23",
    ),
]


def asked(model_config: ModelConfig, values: Values) -> tuple[KVPolicyConfig, Any, Any]:
    """Return a policy, and what a request asks for on a server: as much."""
    vllm_config = engine(model_config).vllm_config
    values = {"budget": 64, **VALUES, **values}
    server = KVPolicyConfig.from_dict({**values, "budget": 64})
    keys = {f"kv_{key}": values[key] for key in ("budget", "recent")}
    params = SimpleNamespace(extra_args=keys, max_tokens=1)
    return (
        KVPolicyConfig.from_dict(values),
        vllm_config,
        (params, 1, vllm_config, server),
    )


@pytest.mark.parametrize(("values", "message"), TOO_SMALL)
def test_a_budget_below_the_drafts_is_refused(
    model_config: ModelConfig, values: Values, message: str
) -> None:
    config, vllm_config, request = asked(model_config, values)
    with pytest.raises(ValueError, match=f"^{message}, because a step speculates"):
        check_drafts(config, vllm_config)
    with pytest.raises(ValueError, match=f"^kv_{message}, because a step speculates"):
        check_params(*request)


@pytest.mark.parametrize(
    "values",
    [
        {"policy": "tova", "budget": 24},
        {"policy": "local", "recent": 6, "sinks": 2},
        {"policy": "tova", "budget": 23, "pin": "prompt"},
    ],
)
def test_as_much_as_the_drafts_will_do(
    model_config: ModelConfig, values: Values
) -> None:
    config, vllm_config, request = asked(model_config, values)
    assert check_drafts(config, vllm_config) is None
    assert check_params(*request) is None


def test_a_request_that_fits_the_pool_has_room_for_drafts(
    model_config: ModelConfig,
) -> None:
    """Without, it would start again for each of its last tokens."""
    scheduler = engine(model_config, budget=128, spare=0.0)
    pool, longest = scheduler.kv_policy_manager.num_usable * 16, 400
    assert pool + DRAFTS < longest
    params = SamplingParams(
        max_tokens=60, ignore_eos=True, extra_args={"kv_policy": "none"}
    )
    given = scheduler.vllm_config, scheduler.kv_policy_config
    with pytest.raises(ValueError, match="superblocks of 16 tokens to reach"):
        check_params(params, pool - 60 - DRAFTS + 1, *given)
    length = pool - 60 - DRAFTS
    check_params(params, length, *given)
    scheduler.add_request(
        Request("all", [5] * length, sampling_params=params, pooling_params=None)
    )
    for _ in range(60):
        assert not run_step(scheduler).preempted_req_ids
        if scheduler.requests:
            drafts = DraftTokenIds(["all"], [[9] * DRAFTS])
            scheduler.update_draft_token_ids(drafts)
    assert not scheduler.requests
