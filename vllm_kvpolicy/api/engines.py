"""What an API process knows of the engines that its requests may go to."""

from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreReadyResponse

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.fingerprint import fingerprint


def server_name(unique: str, config: KVPolicyConfig) -> str:
    """Return the instance id of the engines that one command line starts.

    Args:
        unique: shared by the processes of that command line.
        config: of which the name carries a digest: all but the trace.
    """
    return f"{unique}-{fingerprint(config)[:16]}"


def note_ready(vllm_config: Any, message: bytes) -> None:
    """Take the EngineCoreReadyResponse of an engine, empty where the engine has none.

    Engines of other command lines, as on other hosts, send it too. The VllmConfig of
    the API process keeps the size of the smallest pool; vLLM keeps the sum of all.

    Raises:
        ValueError: the engine runs another policy than this process expects.
    """
    if not message:
        return
    ready = msgspec.msgpack.decode(message, type=EngineCoreReadyResponse)
    if _digest(ready.instance_id) != _digest(vllm_config.instance_id):
        raise ValueError(
            f"data parallelism: engine {ready.data_parallel_rank} has another policy "
            "than this server, or none; expected the same --kv-* flags in every process"
        )
    known = getattr(vllm_config, "kv_policy_pool", ready.num_gpu_blocks)
    vllm_config.kv_policy_pool = min(known, ready.num_gpu_blocks)


def smallest_pool(vllm_config: Any) -> int | None:
    """Return the superblocks of the engine that has the fewest, None if not known yet.

    In the engine's own process they are those of its cache.
    """
    return getattr(
        vllm_config, "kv_policy_pool", vllm_config.cache_config.num_gpu_blocks
    )


def _digest(instance_id: str) -> str:
    return instance_id.partition("-")[2]
