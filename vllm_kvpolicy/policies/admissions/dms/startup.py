"""Checks of models that were trained with DMS, before an engine starts."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config

from vllm_kvpolicy.config_keys import AlwaysKept
from vllm_kvpolicy.policies.admissions.dms.adapter import FLAVOURS, DmsAdapter
from vllm_kvpolicy.policies.admissions.dms.files import load
from vllm_kvpolicy.policies.admissions.dms.model import (
    DmsRule,
    rule_for,
    rule_of_config,
    rule_of_model,
)
from vllm_kvpolicy.policies.catalogue.admissions import DMSOptions
from vllm_kvpolicy.policies.startup import ModelShape, Startup


class DMSStartup(Startup):
    """A model or its adapter decides, and the server has the window of the rule."""

    def check(self, options: DMSOptions, kept: AlwaysKept, vllm_config: Any) -> None:
        """Check the model, and its adapter where there is one; see `Startup`."""
        model_config = vllm_config.model_config
        _supported(model_config.hf_text_config.model_type)
        adapter = _adapter(options.dms_adapter, vllm_config)
        rule = rule_for(model_config, adapter, dict(options))
        size = model_config.get_head_size()
        if not -size <= rule.channel < size:
            raise ValueError(
                f"dms_channel: got {rule.channel}, expected one of {size} channels"
            )
        if math.isinf(rule.offset) and not rule.is_borrowed:
            raise ValueError(
                "dms: dms_disable_eviction is set in config.json, so nothing is "
                "dropped; leave out --kv-policy"
            )
        _check_ranks(rule, vllm_config)
        if kept.recent_tokens != rule.window:
            raise ValueError(
                "dms: the model or adapter was trained with a window of "
                f"{rule.window} tokens, got --kv-recent {kept.recent_tokens}; set "
                f"--kv-recent {rule.window}"
            )
        if adapter is None:
            _check_tokenizer(model_config)

    def refuse_plain(self, model_config: Any) -> None:
        """Refuse a model that borrows a channel of its queries; see `Startup`."""
        rule = rule_of_model(model_config)
        if rule is None or not rule.is_borrowed:
            return
        kind = model_config.hf_text_config.model_type
        advice = (
            f"add --kv-policy dms --kv-recent {rule.window}"
            if kind in FLAVOURS
            else f"--kv-policy dms supports {', '.join(FLAVOURS)}, not {kind}"
        )
        raise ValueError(
            f"{model_config.model} was trained with DMS: one channel of its queries "
            "marks the tokens to drop and is not part of attention. Without DMS the "
            f"model would silently give wrong answers; {advice}"
        )

    def missing_architecture(self, config: Mapping[str, Any]) -> str | None:
        """Return the architecture of a model with `dms_*` keys; see `Startup`."""
        rule = rule_of_config(SimpleNamespace(**config))
        if rule is None:
            return None
        kind = _supported(config.get("model_type"))
        return FLAVOURS[kind] if rule.is_borrowed else f"{FLAVOURS[kind]}DMS"


def _supported(kind: Any) -> str:
    """Return the type of a model; raise ValueError where it is not supported."""
    if kind not in FLAVOURS:
        raise ValueError(
            f"dms: got a model of type {kind}, expected one of {', '.join(FLAVOURS)}"
        )
    return str(kind)


def _check_ranks(rule: DmsRule, vllm_config: Any) -> None:
    """Raise ValueError where a rank would have to decide by a head that it lacks."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.get_total_num_kv_heads()
    if ranks > 1 and rule.per_layer:
        raise ValueError(
            "dms: the first KV head decides for all of its layer (dms_alpha_per), and "
            "one rank has it; set --tensor-parallel-size 1"
        )
    if ranks > heads and rule.is_borrowed:
        raise ValueError(
            "dms: the first query head of a group decides, and ranks that share a KV "
            f"head do not all have it; set --tensor-parallel-size {heads} or less"
        )


def _check_tokenizer(model_config: Any) -> None:
    """Raise ValueError where texts have no tokens.

    Released checkpoints may lack a tokenizer. For some types of models transformers
    then makes an empty one, and every prompt would be empty.
    """
    found = "has no tokenizer"
    try:
        tokenizer = cached_tokenizer_from_config(model_config)
        if tokenizer is None:  # not wanted: prompts are token ids
            return
        if tokenizer.encode("Hello world", add_special_tokens=False):
            return
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        found = f"has no tokenizer that can be read ({said})"
    raise ValueError(
        f"dms: {model_config.tokenizer} {found}; set --tokenizer to the model that "
        "this one was made from, for nvidia/Qwen3-8B-DMS-8x --tokenizer Qwen/Qwen3-8B"
    )


def _adapter(path: str | None, vllm_config: Any) -> DmsAdapter | None:
    """Load an adapter and check that it fits the model; None for none."""
    if path is None:
        return None
    adapter, shape = load(path), ModelShape.of(vllm_config)
    model = vllm_config.model_config
    adapter.check_model(
        model.hf_text_config.model_type,
        shape.num_layers,
        shape.num_kv_heads,
        model.get_hidden_size(),
    )
    return adapter
