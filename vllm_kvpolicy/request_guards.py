"""Checks one request in the API process, so that a bad one never reaches the engine.

Called by patch after vLLM has prepared the request; an error here is an HTTP 400.
Process: api
"""

from typing import Any

from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig

# What is refused per request and what to change; the documentation lists it.
REQUEST_REFUSALS = {
    "resumable sessions (streaming input)": "send each turn as a request of its own",
    "`kv_policy: none` for a request that the pool cannot hold whole": (
        "lower max_tokens, or leave the policy on"
    ),
}


def server_config(vllm_config: Any) -> KVPolicyConfig | None:
    """Return the policy that an engine runs with, or None."""
    additional = vllm_config.additional_config
    values = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    return None if values is None else KVPolicyConfig.from_dict(values)


def check_request(request: Any, vllm_config: Any, server: KVPolicyConfig) -> None:
    """Raise ValueError where the engine could not honour a request.

    Args:
        request: vLLM's EngineCoreRequest.
        vllm_config: of the engine that the request goes to.
        server: the engine's policy.

    Raises:
        ValueError: a bad `kv_*` key, a resumable session, or a full KV cache that is
            larger than the pool.
    """
    if request.resumable:
        raise ValueError(
            f"resumable: got a streaming-input session, which --kv-policy "
            f"{server.policy} does not support, expected each turn as its own request"
        )
    params = request.sampling_params
    if params is None:
        return
    block_size = vllm_config.cache_config.block_size
    if server.with_request(params.extra_args, block_size) is None:
        _check_fits_whole(request, vllm_config)


def _check_fits_whole(request: Any, vllm_config: Any) -> None:
    """Raise ValueError where a request without a policy can outgrow the pool.

    Stock vLLM guarantees at start-up that one request of max_model_len fits. With a
    policy the pool may be smaller; such a request would wait or restart for ever.
    """
    num_blocks = vllm_config.cache_config.num_gpu_blocks
    if num_blocks is None:
        return
    longest = vllm_config.model_config.max_model_len
    wanted = len(request.prompt_token_ids or ()) + request.sampling_params.max_tokens
    # One block is vLLM's null block.
    capacity = (num_blocks - 1) * vllm_config.cache_config.block_size
    if min(wanted, longest) > capacity:
        raise ValueError(
            f"kv_policy: got 'none' for up to {min(wanted, longest)} tokens, expected "
            f"at most the {capacity} tokens that the pool holds"
        )
