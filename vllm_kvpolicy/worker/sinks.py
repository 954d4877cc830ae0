"""Finds a model's learned attention sinks, and refuses what is not tested with them.

A sink is a logit of each query head that takes part in every softmax and whose share no
token gets (gpt-oss, arXiv 2508.10925, section 2.2).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_kvpolicy import compat
from vllm_kvpolicy.policies.base import Policy


def sinks_of(layers: Sequence[Any]) -> torch.Tensor | None:
    """Return the logits of the sinks, [L, Hq] float32; None if there are none.

    Args:
        layers: vLLM's attention layers, loaded; all of them have sinks or none has.
    """
    found = [getattr(layer.impl, "sinks", None) for layer in layers]
    rows = [sinks.detach().float() for sinks in found if sinks is not None]
    return torch.stack(rows) if rows else None


def check_takes_sinks(
    policies: Mapping[str, Policy], is_ragged: bool, vllm_config: Any
) -> None:
    """Refuse policies and engines that do not count sinks.

    Args:
        policies: by name.
        is_ragged: heads keep different numbers of tokens.
        vllm_config: the engine's configuration.

    Raises:
        ValueError: something that does not take them, or was not tested with them.
    """
    untested = {
        "per-head lengths": is_ragged,
        "GPUs": compat.platform_name() != "cpu",
        "tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "weight transfer": vllm_config.weight_transfer_config is not None,
        "FP8 KV caches": vllm_config.cache_config.cache_dtype.startswith("fp8"),
    }
    for what, applies in untested.items():
        if applies:
            raise ValueError(
                f"learned attention sinks: expected an engine without {what}, which "
                "no test has run with them"
            )
    own = [name for name, policy in policies.items() if policy.weighs_itself]
    if own:
        raise ValueError(
            f"learned attention sinks: got {', '.join(own)}, which computes attention "
            "of its own that leaves sinks out; choose other policies, also in `allow`"
        )
