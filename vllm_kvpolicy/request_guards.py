"""Checks one request in the API process, so that a bad one never reaches the engine.

Called by patch after vLLM has prepared the request; an error here is an HTTP 400.
Process: api
"""

from typing import Any

from vllm_kvpolicy.config import CONFIG_KEY, PER_REQUEST_OFF, KVPolicyConfig

# What is refused per request and what to change; the documentation lists it.
REQUEST_REFUSALS = {
    "resumable sessions (streaming input)": "send each turn as a request of its own",
    "requests that the pool cannot hold at their longest": (
        "lower max_tokens or kv_budget, or leave the policy on"
    ),
}


def server_config(vllm_config: Any) -> KVPolicyConfig | None:
    """Return the policy that an engine runs with, or None."""
    additional = vllm_config.additional_config
    values = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    return None if values is None else KVPolicyConfig.from_dict(values)


def check_request(request: Any, vllm_config: Any, server: KVPolicyConfig) -> None:
    """Raise ValueError where the engine could not honour a prepared request.

    Args:
        request: vLLM's EngineCoreRequest.
        vllm_config: of the engine that the request goes to.
        server: the engine's policy.

    Raises:
        ValueError: a resumable session, or what `check_params` refuses.
    """
    if request.resumable:
        raise ValueError(
            f"resumable: got a streaming-input session, which --kv-policy "
            f"{server.policy} does not support, expected each turn as its own request"
        )
    if request.sampling_params is not None:
        prompt_tokens = len(request.prompt_token_ids or ())
        check_params(request.sampling_params, prompt_tokens, vllm_config, server)


def check_params(
    params: Any, prompt_tokens: int, vllm_config: Any, server: KVPolicyConfig
) -> None:
    """Raise ValueError where the engine could not honour what a request asks for.

    Stock vLLM guarantees at start-up that one request of max_model_len fits. With a
    policy the pool may be smaller; a request that outgrows it, because it switches the
    policy off or because its prompt is protected, would wait or restart for ever.

    Args:
        params: vLLM's SamplingParams.
        prompt_tokens: length of the prompt, 0 where it is not known yet.
        vllm_config: of the engine that the request goes to.
        server: the engine's policy.

    Raises:
        ValueError: a bad `kv_*` key, or a cache larger than the pool.
    """
    cache_config = vllm_config.cache_config
    block_size, num_blocks = cache_config.block_size, cache_config.num_gpu_blocks
    config = server.with_request(params.extra_args, block_size)
    if num_blocks is None:
        return
    longest = vllm_config.model_config.max_model_len
    tokens = min(prompt_tokens + (params.max_tokens or longest), longest)
    wanted = -(-tokens // block_size)
    if config is not None:
        footprint = config.footprint(max(prompt_tokens, 1), block_size)
        wanted = footprint.peak_blocks(tokens)
    # One block is vLLM's null block.
    if wanted > num_blocks - 1:
        name = PER_REQUEST_OFF if config is None else config.policy
        raise ValueError(
            f"kv_policy: with {name!r} this request holds up to {wanted} superblocks "
            f"of {block_size} tokens on its way to {tokens} tokens, expected at most "
            f"the {num_blocks - 1} that the pool has"
        )
