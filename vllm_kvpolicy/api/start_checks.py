"""Checks the files and folders that a configuration names, before an engine starts."""

import math
from pathlib import Path
from typing import Any

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies import calibration
from vllm_kvpolicy.policies.admissions.dms import files as dms_files
from vllm_kvpolicy.policies.admissions.dms.adapter import FLAVOURS
from vllm_kvpolicy.policies.admissions.dms.model import refuse_plain, rule_for
from vllm_kvpolicy.policies.admissions.duo import files as duo_files
from vllm_kvpolicy.policies.admissions.wgkv import files as wgkv_files
from vllm_kvpolicy.policies.catalogue.names import parse
from vllm_kvpolicy.trace.files import check_trace


def check_files(config: KVPolicyConfig, vllm_config: Any) -> None:
    """Check every file that one of the policies reads, and the folder of a trace.

    Args:
        config: the server's policy.
        vllm_config: the finished VllmConfig, for the model's shape.

    Raises:
        ValueError: naming key, path, what was found and what is expected.
    """
    files = {
        param.name: (config.options_of(name)[param.name], param.holds)
        for name in config.policies
        for param in parse(name).params
        if param.holds
    }
    for key, (path, kind) in files.items():
        try:
            if kind == "wgkv":
                _check_gates(path, config, vllm_config)
            elif kind == "duo":
                _check_pattern(path, config, vllm_config)
            elif kind == "dms":
                _check_decisions(path, config, vllm_config)
            else:
                found = calibration.load(path, kind)
                found.check_model(*_model_shape(vllm_config))
        except ValueError as error:
            label = "" if str(error).startswith("dms") else f"{key}: "
            raise ValueError(f"{label}{error}") from None
    deciding = {
        name.partition("+")[0]
        for name in config.policies
        if "dms_adapter" in config.options_of(name)
        or config.options_of(name).get("exact")
    }
    if len(deciding) > 1:
        raise ValueError(
            f"allow: got {' and '.join(sorted(deciding))}, expected one admission that "
            "decides while tokens are computed, as dms and any with `exact` do"
        )
    if "dms_adapter" not in files:
        refuse_plain(vllm_config.model_config)
    if config.trace_dir is not None:
        check_trace(Path(config.trace_dir))


def _check_gates(path: str, config: KVPolicyConfig, vllm_config: Any) -> None:
    """Check that gates belong to the model, and that the server has their window."""
    gates, text = wgkv_files.load(path), vllm_config.model_config.hf_text_config
    num_layers, _, num_kv_heads, head_dim = _model_shape(vllm_config)
    rope = getattr(text, "rope_parameters", None) or {}
    theta = float(rope.get("rope_theta", math.nan))
    gates.check_model(text.model_type, num_layers, num_kv_heads, head_dim, theta)
    if config.sink_tokens < gates.sinks:
        raise ValueError(
            f"wgkv gates {path}: trained with {gates.sinks} sinks, got --kv-sinks "
            f"{config.sink_tokens}; set --kv-sinks {gates.sinks} or more"
        )
    if config.recent_tokens != gates.window:
        raise ValueError(
            f"wgkv gates {path}: trained with a window of {gates.window} tokens, got "
            f"--kv-recent {config.recent_tokens}; set --kv-recent {gates.window}"
        )


def _check_pattern(path: str, config: KVPolicyConfig, vllm_config: Any) -> None:
    """Check that a pattern belongs to the model, and that the server has its window."""
    pattern = duo_files.load(path)
    num_layers, _, num_kv_heads, _ = _model_shape(vllm_config)
    pattern.check_shape(num_layers, num_kv_heads)
    if config.sink_tokens < pattern.sinks or config.recent_tokens != pattern.recent:
        raise ValueError(
            f"duo pattern {path}: made with {pattern.sinks} sinks, {pattern.recent} "
            f"recent tokens, got --kv-sinks {config.sink_tokens} --kv-recent "
            f"{config.recent_tokens}; set --kv-sinks {pattern.sinks} --kv-recent "
            f"{pattern.recent}"
        )


def _check_decisions(
    path: str | None, config: KVPolicyConfig, vllm_config: Any
) -> None:
    """Check that a model or its adapter decides, and that the server has its window."""
    model_config, adapter = vllm_config.model_config, None
    text = model_config.hf_text_config
    if text.model_type not in FLAVOURS:
        raise ValueError(
            f"dms: got a model of type {text.model_type}, expected one of "
            f"{', '.join(FLAVOURS)}"
        )
    if path is not None:
        adapter = dms_files.load(path)
        num_layers, _, num_kv_heads, _ = _model_shape(vllm_config)
        sizes = num_layers, num_kv_heads, model_config.get_hidden_size()
        adapter.check_model(text.model_type, *sizes)
    name = next(n for n in config.policies if n.partition("+")[0] == "dms")
    options, size = config.options_of(name), model_config.get_head_size()
    rule = rule_for(model_config, adapter, options)
    if not -size <= rule.channel < size:
        raise ValueError(
            f"dms_channel: got {rule.channel}, expected one of {size} channels"
        )
    if math.isinf(rule.offset) and not rule.is_borrowed:
        raise ValueError(
            "dms: dms_disable_eviction is set in config.json, so nothing is dropped; "
            "leave out --kv-policy"
        )
    if config.recent_tokens != rule.window:
        raise ValueError(
            f"dms: decided for a window of {rule.window} tokens, got --kv-recent "
            f"{config.recent_tokens}; set --kv-recent {rule.window}"
        )


def _model_shape(vllm_config: Any) -> tuple[int, int, int, int]:
    """Return layers, query heads, KV heads and channels per head of the model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return (
        model.get_num_layers(parallel),
        model.get_num_attention_heads(parallel),
        model.get_num_kv_heads(parallel),
        model.get_head_size(),
    )
