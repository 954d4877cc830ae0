"""Checks one request in the API process, so that a bad one never reaches the engine.

What is wrong is a `KVPolicyRequestError`, or a ValueError within `client_errors`.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_kvpolicy.api.engines import smallest_pool
from vllm_kvpolicy.config import PER_REQUEST_OFF, KVPolicyConfig
from vllm_kvpolicy.config_keys import NONE, PROMPT, SYSTEM, request_keys, wrong
from vllm_kvpolicy.config_values import server_config
from vllm_kvpolicy.sizes import check_drafts, most_blocks, other_groups, own_block_size

# What is refused per request and what to change; the documentation lists it.
REQUEST_REFUSALS = {
    "resumable sessions (streaming input)": "send each turn as a separate request",
    "beam search with `kv_*` keys in vllm_xargs": (
        "leave out use_beam_search or the keys: vLLM's beam search drops vllm_xargs"
    ),
    "requests whose peak size exceeds the KV cache pool": (
        "lower max_tokens, kv_budget or kv_pin, or do not turn the policy off; a "
        "server with a smaller prefill_interval fits longer prompts"
    ),
}


class KVPolicyRequestError(VLLMValidationError, ValueError):
    """A request that the policy refuses: HTTP 400, and ValueError for `LLM` users."""


def check_prepared(processor: Any, request: Any, params: Any) -> None:
    """Refuse what the engine could not honour, once vLLM has prepared a request.

    Args:
        processor: vLLM's InputProcessor.
        request: the EngineCoreRequest that it has made of `params`, of a request that
            samples or pools.

    Raises:
        KVPolicyRequestError: a resumable session, or what `check_params` refuses.
    """
    server = server_config(processor.vllm_config)
    if server is None:
        return
    with client_errors():
        if request.resumable:
            raise ValueError(
                "resumable: got a streaming-input session, which --kv-policy "
                f"{server.policy} does not support; send each turn as a separate "
                "request"
            )
        if request.sampling_params is not None:
            prompt_tokens = len(request.prompt_token_ids or ())
            _check_once(params, prompt_tokens, processor.vllm_config, server)


def check_early(
    engine: Any, prompt: Any, sampling_params: Any, *_: Any, **__: Any
) -> None:
    """Check a request whose answer has not begun, its prompt as far as it is known.

    Args:
        engine: vLLM's AsyncLLM, of whose `generate` these are the parameters.
        prompt: text, or a mapping that may hold `prompt_token_ids`.
    """
    server = server_config(engine.vllm_config)
    if server is not None:
        known = isinstance(prompt, dict) and prompt.get("prompt_token_ids")
        with client_errors():
            tokens = len(known or ())
            _check_once(sampling_params, tokens, engine.vllm_config, server)


def _check_once(
    params: Any, prompt_tokens: int, vllm_config: Any, server: KVPolicyConfig
) -> None:
    """Do as `check_params`, unless the same has passed for the same engine.

    An HTTP request comes here before its answer begins and again when vLLM prepares it,
    where it finds the note of its check. Offline requests come here once.
    """
    asked = dict(params.extra_args or {})
    seen = (vllm_config.instance_id, prompt_tokens, params.max_tokens, asked)
    if getattr(params, "kv_policy_checked", None) != seen:
        check_params(params, prompt_tokens, vllm_config, server)
        params.kv_policy_checked = seen


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn ValueError into the error that vLLM answers with HTTP 400."""
    try:
        yield
    except ValueError as error:
        raise KVPolicyRequestError(str(error)) from None


def check_params(
    params: Any, prompt_tokens: int, vllm_config: Any, server: KVPolicyConfig
) -> None:
    """Raise ValueError where the engine could not honour what a request asks for.

    Stock vLLM guarantees at start-up that one request of max_model_len fits. With a
    policy the pool may be smaller; a request that outgrows it, because it switches the
    policy off or because much of it is pinned, would wait or restart for ever.

    Args:
        prompt_tokens: length of the prompt, 0 where it is not known yet.

    Raises:
        ValueError: a bad `kv_*` key, drafts beyond the first event, or a cache larger
            than the pool.
    """
    longest = vllm_config.model_config.max_model_len
    tokens = min(prompt_tokens + (params.max_tokens or longest), longest)
    block_size = own_block_size(vllm_config)
    config = server.with_request(params.extra_args, block_size, (prompt_tokens, tokens))
    if (params.extra_args or {}).get("kv_pin") == SYSTEM:
        expected = (
            f"{NONE!r}, {PROMPT!r} or a number of tokens: no chat template is rendered "
            "for it"
        )
        raise wrong("kv_pin", SYSTEM, expected)
    if config is not None:
        check_drafts(config, vllm_config, "kv_")
    # What a step drafts past the end takes superblocks, too.
    tokens = min(tokens + vllm_config.num_speculative_tokens, longest)
    _check_size(prompt_tokens, tokens, vllm_config, config)


def _check_size(
    prompt_tokens: int, tokens: int, vllm_config: Any, config: KVPolicyConfig | None
) -> None:
    """Raise ValueError where a request of `tokens` in the end outgrows the pool."""
    num_blocks, block_size = smallest_pool(vllm_config), own_block_size(vllm_config)
    if num_blocks is None:
        return
    longest = vllm_config.model_config.max_model_len
    others = other_groups(vllm_config).most_blocks(tokens)
    pool = num_blocks - 1  # without vLLM's null block

    def held(config: KVPolicyConfig) -> int:
        return most_blocks(vllm_config, config, max(prompt_tokens, 1), tokens) + others

    ahead = min(tokens + vllm_config.num_lookahead_tokens, longest)
    wanted = -(-ahead // block_size) + others if config is None else held(config)
    if wanted <= pool:
        return
    needs = (
        f"this request needs up to {wanted} superblocks of {block_size} tokens to "
        f"reach {tokens} tokens"
    )
    if config is not None and config.pins not in (NONE, 0):
        pins = range(0, config.pinned_tokens(prompt_tokens), block_size)
        fits = bisect_right(
            pins,
            pool,
            key=lambda pin: held(replace(config, pin=pin, is_checked=True)),
        )
        if fits:
            most = pins[fits - 1]
            raise ValueError(
                f"kv_pin: got {config.pins!r}, asked for or by default, expected "
                f"{NONE!r}{f' or at most {most} tokens' if most else ''}: pinned "
                f"tokens stay, and so {needs}, of {pool} in the pool; or lower "
                "max_tokens"
            )
    name = PER_REQUEST_OFF if config is None else config.policy
    raise ValueError(
        f"kv_policy: with {name!r} {needs}, expected at most {pool}, the size of the "
        f"pool; lower max_tokens or {_other_advice(config, block_size)}"
    )


def _other_advice(config: KVPolicyConfig | None, block_size: int) -> str:
    """Say what else makes a request smaller that runs with `config`."""
    if config is None:
        return "leave out kv_policy 'none'"
    info = config.resolved().info
    if info.keeps_all and info.admission is None:
        return "shorten the prompt: this policy keeps every token"
    if info.keeps_all:
        return "shorten the prompt: the gates may admit everything"
    step, tokens = config.prefill_interval_tokens, config.prefill_step(block_size)
    smaller = f"in place of {step!r}" if isinstance(step, str) else f"below {tokens}"
    return f"kv_budget, or start the server with a prefill_interval {smaller}"


def check_beam_search(extra_args: Mapping[str, Any] | None) -> None:
    """Refuse a beam search whose `vllm_xargs` have keys that it would not follow.

    Raises:
        KVPolicyRequestError: naming the first such key, or one that is unknown.
    """
    with client_errors():
        for key in request_keys(extra_args):
            raise ValueError(
                f"{key}: has no effect with use_beam_search; leave one of them out"
            )
