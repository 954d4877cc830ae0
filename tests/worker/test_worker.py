"""What the worker refuses, and what it believes, before a model runs."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import (
    _ATTN_OVERRIDES,
    AttentionBackendEnum,
    register_backend,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvpolicy import compat
from vllm_kvpolicy.protocol import NO_COMMANDS, StepCommands
from vllm_kvpolicy.worker.worker import KVPolicyWorkerMixin, layer_refusals


def layer(**changes):
    """An attention layer that is fine but for `changes`."""
    backend = SimpleNamespace(keys_are_columns=False)
    impl = SimpleNamespace(
        alibi_slopes=None, logits_soft_cap=0, sinks=None, scale=changes.pop("scale", 1)
    )
    for name in ("alibi_slopes", "logits_soft_cap", "sinks"):
        setattr(impl, name, changes.pop(name, getattr(impl, name)))
    values = {
        "attn_backend": backend,
        "impl": impl,
        "kv_sharing_target_layer_name": None,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "kv_cache_torch_dtype": torch.bfloat16,
        "_k_scale": torch.tensor(1.0),
        "_v_scale": torch.tensor(1.0),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_backend": SimpleNamespace()}, "an attention backend other than"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "an attention logit soft cap"),
        ({"sinks": [0.1]}, "learned sinks"),
        (
            {"kv_sharing_target_layer_name": "z"},
            "the keys and values of a layer without full attention",
        ),
        ({"kv_cache_torch_dtype": torch.uint8}, "a KV cache of a dtype other than"),
        ({"kv_cache_torch_dtype": torch.float16}, "a KV cache of a dtype other than"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of another kind than --kv-cache-dtype"),
        ({"kv_cache_update_bypass": True}, "a model that writes keys and values"),
        ({"scale": 0.5}, "a softmax scale, or heads,"),
        ({"num_heads": 8}, "a softmax scale, or heads, unlike"),
        ({"head_size": 32}, "a softmax scale, or heads, unlike"),
    ],
)
def test_a_layer_that_scores_would_get_wrong_is_refused(changes, reason):
    layers = {"a": layer(), "b": layer(**changes), "c": layer(**changes)}
    (found,) = layer_refusals(layers, "auto")
    assert found.startswith(f"b has {reason}") and found.endswith("(2 layers)")


@pytest.mark.parametrize("name", ["_k_scale", "_v_scale"])
def test_fp8_scales_are_one_per_layer(name):
    """A list of them, one per KV head, would be taken for the first."""
    fp8 = {"kv_cache_dtype": "fp8", "kv_cache_torch_dtype": torch.uint8}
    assert layer_refusals({"a": layer(**fp8)}, "fp8") == []
    (found,) = layer_refusals({"a": layer(**fp8, **{name: torch.ones(2)})}, "fp8")
    assert found.startswith("a has an FP8 scale for each KV head")
    (found,) = layer_refusals({"a": layer(**fp8), "b": layer()}, "fp8")
    assert found == "b has a KV cache of another kind than --kv-cache-dtype fp8"


def test_plain_layers_are_fine_and_none_are_not():
    assert layer_refusals({"a": layer(), "b": layer()}, "auto") == []
    assert layer_refusals({}, "auto") == ["no attention layers were found in the model"]


def test_lost_commands_stop_the_worker():
    worker = KVPolicyWorkerMixin()
    warm_up, step = SimpleNamespace(), SimpleNamespace()
    step.kv_policy_commands = StepCommands((), ())
    assert worker._commands_of(warm_up) == NO_COMMANDS
    assert worker._commands_of(step) == step.kv_policy_commands
    with pytest.raises(RuntimeError, match="without the KV policy's commands"):
        worker._commands_of(warm_up)


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_graphs_hold_decoding_and_more_where_heads_have_no_own_tables(name):
    """Only batches of one token per request need no other order of queries."""
    before = dict(_ATTN_OVERRIDES)
    try:
        backend = AttentionBackendEnum[f"{name.upper()}_ATTN"]
        register_backend(backend, compat.GPU_BACKENDS[backend.name])
        chosen = backend.get_class()
        assert chosen.__module__ == f"vllm_kvpolicy.worker.backends.{name}"
        assert chosen.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
        builder = chosen.get_builder_cls()
        assert not builder.supports_update_block_table
        stock = builder.__mro__[2]._cudagraph_support
        assert stock is not AttentionCGSupport.NEVER
        for policy, expected in (
            ("hard-snapkv", AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
            ("tova+quest", AttentionCGSupport.NEVER),
            ("tova", stock),
            (None, stock),
        ):
            config = SimpleNamespace(additional_config={})
            if policy:
                config.additional_config = {"kv_policy": {"policy": policy}}
            assert builder.get_cudagraph_support(config, None) is expected
    finally:
        _ATTN_OVERRIDES.clear()
        _ATTN_OVERRIDES.update(before)
