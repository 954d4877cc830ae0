"""`vllm_kvpolicy.LLM`: keywords end up where the flags do."""

import pytest
import vllm

import vllm_kvpolicy
from vllm_kvpolicy.config import KVPolicyConfig


@pytest.fixture
def made(monkeypatch):
    """What vLLM's own class was called with; no engine starts."""
    calls = []
    monkeypatch.setattr(
        vllm.LLM,
        "__init__",
        lambda self, model, **kwargs: calls.append((model, kwargs)),
    )
    return calls


def test_keywords_become_the_plain_form(made):
    vllm_kvpolicy.LLM(
        "model",
        kv_policy="ams-tova",
        kv_budget=128,
        kv_interval=64,
        kv_recent=16,
        kv_sinks=2,
        kv_events="pressure",
        kv_policy_config={"preset": "code"},
        dtype="float32",
    )
    ((model, kwargs),) = made
    assert (model, kwargs["dtype"]) == ("model", "float32")
    config = KVPolicyConfig.from_dict(kwargs["additional_config"]["kv_policy"])
    assert (config.budget_tokens, config.interval_tokens) == (128, 64)
    assert (config.recent_tokens, config.sink_tokens) == (16, 2)
    assert config.resolved().options["preset"] == "code"
    assert config.events == "pressure"


def test_without_a_policy_it_is_vllms_class(made):
    vllm_kvpolicy.LLM("model")
    assert made == [("model", {"additional_config": {}})]
    assert issubclass(vllm_kvpolicy.LLM, vllm.LLM)


@pytest.mark.parametrize("own", [True, False], ids=["ours", "vLLM's"])
def test_what_is_wrong_is_raised_and_ends_no_program(tiny_model, own):
    """Unlike `vllm serve`, which ends with status 2."""
    shape = {"dtype": "float32", "kv_cache_memory_bytes": 2**23}
    wrong = {"policy": "tova", "budget": 36}
    with pytest.raises(ValueError, match="budget: got 36, expected at least 68 tokens"):
        if own:
            vllm_kvpolicy.LLM(str(tiny_model), kv_policy="tova", kv_budget=36, **shape)
        else:
            vllm.LLM(str(tiny_model), additional_config={"kv_policy": wrong}, **shape)


def test_the_package_has_nothing_else():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = vllm_kvpolicy.LMM
