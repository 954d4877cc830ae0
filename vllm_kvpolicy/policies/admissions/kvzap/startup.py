"""Checks of a KVzap surrogate before an engine starts."""

from typing import Any

from vllm_kvpolicy.config_keys import AlwaysKept
from vllm_kvpolicy.policies.admissions.kvzap.files import load
from vllm_kvpolicy.policies.catalogue.admissions import KVzapOptions
from vllm_kvpolicy.policies.startup import ModelShape, Startup, errors_name


class KVzapStartup(Startup):
    """A surrogate fits the model; it works with any window."""

    def check(self, options: KVzapOptions, kept: AlwaysKept, vllm_config: Any) -> None:
        """Check the folder of a surrogate; see `Startup`."""
        with errors_name("kvzap_model"):
            surrogate, shape = load(options.kvzap_model), ModelShape.of(vllm_config)
            surrogate.check_model(
                shape.num_layers,
                shape.num_kv_heads,
                vllm_config.model_config.get_hidden_size(),
            )
