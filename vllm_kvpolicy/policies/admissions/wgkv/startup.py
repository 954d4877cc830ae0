"""Checks of write gates before an engine starts."""

import math
from typing import Any

from vllm_kvpolicy.config_keys import AlwaysKept
from vllm_kvpolicy.policies.admissions.wgkv.files import load
from vllm_kvpolicy.policies.catalogue.admissions import WGKVOptions
from vllm_kvpolicy.policies.startup import ModelShape, Startup, errors_name


class WGKVStartup(Startup):
    """Gates fit the model, and the server has the window they were trained with."""

    def check(self, options: WGKVOptions, kept: AlwaysKept, vllm_config: Any) -> None:
        """Check the file of gates; see `Startup`."""
        path = options.wgkv_gates
        with errors_name("wgkv_gates"):
            gates, text = load(path), vllm_config.model_config.hf_text_config
            shape = ModelShape.of(vllm_config)
            rope = getattr(text, "rope_parameters", None) or {}
            gates.check_model(
                text.model_type,
                shape.num_layers,
                shape.num_kv_heads,
                shape.head_dim,
                float(rope.get("rope_theta", math.nan)),
            )
            if kept.sink_tokens < gates.sinks:
                raise ValueError(
                    f"wgkv gates {path}: trained with {gates.sinks} sinks, got "
                    f"--kv-sinks {kept.sink_tokens}; set --kv-sinks {gates.sinks} or "
                    "more"
                )
            if kept.recent_tokens != gates.window:
                raise ValueError(
                    f"wgkv gates {path}: trained with a window of {gates.window} "
                    f"tokens, got --kv-recent {kept.recent_tokens}; set --kv-recent "
                    f"{gates.window}"
                )
