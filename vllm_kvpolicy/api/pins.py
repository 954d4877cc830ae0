"""Finds how many tokens of a chat are its system messages and tools.

Chat templates do not tell. So the beginning of a chat is rendered once more, with
another message behind it: as far as both agree, nothing of that message shows.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any

from vllm.logger import init_logger

from vllm_kvpolicy.config import PER_REQUEST_OFF, KVPolicyConfig, server_config
from vllm_kvpolicy.config_keys import NONE, PROMPT, SYSTEM

logger = init_logger("vllm.kv_policy")
ROLES = ("system", "developer")
OTHER = {"role": "user", "content": "\u2060"}  # begins like no message that people send


def check_server(config: KVPolicyConfig, vllm_config: Any, serves_chats: bool) -> None:
    """Raise ValueError where SYSTEM is to be pinned and no template is rendered."""
    is_harmony = vllm_config.model_config.hf_config.model_type == "gpt_oss"
    if config.pin == SYSTEM and (is_harmony or not serves_chats):
        raise ValueError(
            f"kv_pin: got {SYSTEM!r}, expected {NONE!r}, {PROMPT!r} or a number of "
            "tokens: only a server that renders a chat's template knows the rest"
        )


def wants_system(vllm_config: Any, request: Any) -> bool:
    """Return whether a chat, or else its server, pins SYSTEM."""
    server = server_config(vllm_config)
    if server is None or getattr(request, "use_beam_search", False):
        return False
    if not hasattr(request, "vllm_xargs"):  # as what only counts tokens
        return False
    asked = request.vllm_xargs or {}
    name = asked.get("kv_policy", server.policy)
    if "kv_pin" not in asked and name in server.policies:
        return server.pin == SYSTEM and not server.resolved(name).is_exact
    return name != PER_REQUEST_OFF and asked.get("kv_pin") == SYSTEM


def listed(messages: Sequence[Any]) -> list[Any]:
    """Return messages whose parts can be read twice; pydantic's only once."""
    found = list(messages)
    for message in found:
        parts = message.get("content") if isinstance(message, dict) else None
        if parts is not None and not isinstance(parts, str | list):
            message["content"] = list(parts)
    return found


async def pin_system(
    render: Callable[..., Awaitable[Any]],
    request: Any,
    messages: Sequence[Any],
    prompt: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Put the number of tokens in place of SYSTEM.

    Args:
        render: returns the conversation and the prompt of messages.
        request: of a chat; its `vllm_xargs` are replaced.
        prompt: what vLLM has rendered of `messages`.
        args, options: what `render` takes beside messages.
    """
    known, count = prompt.get("prompt_token_ids") or (), 0
    first = takewhile(lambda each: _role(each) in ROLES, messages)
    without = {**options, "parser": None}  # which would change the request
    try:
        _, (other,) = await render([*first, OTHER], *args, **without)
    except Exception as error:  # of the template, or about the length
        logger.warning("nothing is pinned of a chat: %s", error)
    else:
        pairs = zip(known, other.get("prompt_token_ids") or (), strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    request.vllm_xargs = {**(request.vllm_xargs or {}), "kv_pin": count}


def _role(message: Any) -> str:
    return message["role"] if isinstance(message, dict) else message.role
