"""Refuses what is not tested with learned sinks: rows of the table in `guards`.

They are logits that take part in every softmax, see `worker.sinks`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api.refusal import Refusal, is_float8, is_ragged, listed
from vllm_kvpolicy.config import server_config


def _with(applies: Callable[[Any], object], config: Any) -> bool:
    """Return whether the model has learned sinks, and `applies`."""
    return compat.has_learned_sinks(config) and bool(applies(config))


def _weighs_itself(config: Any) -> bool:
    server = server_config(config)
    return server is not None and any(
        each.info.weighs_itself for each in server.all_resolved
    )


_WEIGHING = listed("weighs_itself")

SINK_REFUSALS = (
    Refusal(
        f"learned sinks (gpt-oss) with attention of a policy's own ({_WEIGHING})",
        partial(_with, _weighs_itself),
        "choose other policies, also in `allow`: theirs leaves sinks out",
    ),
    Refusal(
        "per-head lengths with learned sinks",
        partial(_with, is_ragged),
        "choose policies whose heads keep equal numbers of tokens, also in `allow`",
    ),
    Refusal(
        "tensor parallelism with learned sinks",
        partial(_with, lambda config: config.parallel_config.tensor_parallel_size > 1),
        "set --tensor-parallel-size 1",
    ),
    Refusal(
        "speculative decoding with learned sinks",
        partial(_with, lambda config: config.speculative_config is not None),
        "leave out --speculative-config",
    ),
    Refusal(
        "LoRA adapters with learned sinks",
        partial(_with, lambda config: config.lora_config is not None),
        "leave out --enable-lora, or merge the adapter into the model",
    ),
    Refusal(
        "weight transfer with learned sinks",
        partial(_with, lambda config: config.weight_transfer_config is not None),
        "leave out --weight-transfer-config",
    ),
    Refusal(
        "FP8 KV caches with learned sinks",
        partial(_with, is_float8),
        "leave out --kv-cache-dtype",
    ),
    Refusal(
        "learned sinks on GPUs",
        partial(_with, lambda _: compat.platform_name() != "cpu"),
        "serve a model without learned sinks: no GPU has run a policy with them",
    ),
)
