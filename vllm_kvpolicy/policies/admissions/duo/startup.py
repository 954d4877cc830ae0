"""Checks of a DuoAttention pattern before an engine starts."""

from typing import Any

from vllm_kvpolicy.config_keys import AlwaysKept
from vllm_kvpolicy.policies.admissions.duo.files import load
from vllm_kvpolicy.policies.catalogue.admissions import DuoOptions
from vllm_kvpolicy.policies.startup import ModelShape, Startup, errors_name


class DuoStartup(Startup):
    """A pattern fits the model, and the server has the window it was made with."""

    def check(self, options: DuoOptions, kept: AlwaysKept, vllm_config: Any) -> None:
        """Check the folder of a pattern; see `Startup`."""
        path = options.duo_pattern
        with errors_name("duo_pattern"):
            pattern, shape = load(path), ModelShape.of(vllm_config)
            pattern.check_shape(shape.num_layers, shape.num_kv_heads)
            sinks, recent = pattern.sinks, pattern.recent
            if kept.sink_tokens < sinks or kept.recent_tokens != recent:
                raise ValueError(
                    f"duo pattern {path}: made with {sinks} sinks, {recent} recent "
                    f"tokens, got --kv-sinks {kept.sink_tokens} --kv-recent "
                    f"{kept.recent_tokens}; set --kv-sinks {sinks} --kv-recent "
                    f"{recent}"
                )
