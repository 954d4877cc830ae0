"""Finds which tokens of a chat's prompt are its system messages, or any message.

Chat templates do not tell. So a chat is rendered once more, with something else in the
place of what is looked for: as far as both agree, nothing of that shows.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any

from vllm.logger import init_logger

from vllm_kvpolicy.api.request_guards import client_errors
from vllm_kvpolicy.config import PER_REQUEST_OFF, KVPolicyConfig
from vllm_kvpolicy.config_keys import MESSAGE_KEYS, NONE, PROMPT, SYSTEM, wrong
from vllm_kvpolicy.config_values import server_config
from vllm_kvpolicy.hints import MOST_RANGES, ranges_of

logger = init_logger("vllm.kv_policy")
ROLES = ("system", "developer")
OTHER = "\u2060"  # begins and ends like no message that people send
Render = Callable[[Sequence[Any]], Awaitable[Sequence[int]]]


def check_server(config: KVPolicyConfig, vllm_config: Any, serves_chats: bool) -> None:
    """Raise ValueError where SYSTEM is to be pinned and no template is rendered."""
    is_harmony = vllm_config.model_config.hf_config.model_type == "gpt_oss"
    if config.pin == SYSTEM and (is_harmony or not serves_chats):
        raise ValueError(
            f"kv_pin: got {SYSTEM!r}, expected {NONE!r}, {PROMPT!r} or a number of "
            "tokens: only a server that renders a chat's template knows the rest"
        )


def wants(vllm_config: Any, request: Any) -> set[str]:
    """Return the keys of a chat, or of its server, that take a look at its template."""
    server = server_config(vllm_config)
    if server is None or getattr(request, "use_beam_search", False):
        return set()
    # What only counts tokens has no such field, and takes anything by that name.
    unknown = getattr(request, "model_extra", None) or {}
    if not hasattr(request, "vllm_xargs") or "vllm_xargs" in unknown:
        return set()
    asked = request.vllm_xargs or {}
    name = asked.get("kv_policy", server.policy)
    if name == PER_REQUEST_OFF:
        return set()
    pin = asked.get("kv_pin")
    if "kv_pin" not in asked and name in server.policies:
        pin = NONE if server.resolved(name).is_exact else server.pin
    # Others put messages of their own among those of a request.
    has_messages = server.hints and hasattr(request, "messages")
    found = asked.keys() & MESSAGE_KEYS.keys() if has_messages else set()
    return found | ({"kv_pin"} if pin == SYSTEM else set())


def listed(messages: Sequence[Any]) -> list[Any]:
    """Return messages whose parts can be read twice; pydantic's only once."""
    found = list(messages)
    for message in found:
        parts = message.get("content") if isinstance(message, dict) else None
        if parts is not None and not isinstance(parts, str | list):
            message["content"] = list(parts)
    return found


async def put_tokens(
    keys: set[str],
    render: Render,
    request: Any,
    messages: Sequence[Any],
    known: Sequence[int],
) -> None:
    """Put numbers of tokens in the place of SYSTEM, and ranges in that of messages.

    Args:
        keys: see `wants`.
        render: returns the tokens of a chat.
        request: its `vllm_xargs` are replaced.
        known: tokens of `messages`.

    Raises:
        KVPolicyRequestError: a bad index, a message of which nothing shows or that is
            to stay and to go, or a prompt that will be cut.
    """
    asked = dict(request.vllm_xargs or {})
    with client_errors():
        if getattr(request, "truncate_prompt_tokens", None) is not None:
            for key in sorted(keys & asked.keys()):
                other = MESSAGE_KEYS.get(key, "a number")
                expected = f"{other}, which counts the tokens that are left"
                raise wrong(key, asked[key], f"{expected} by truncate_prompt_tokens")
        if "kv_pin" in keys:
            try:
                asked["kv_pin"] = await system_tokens(render, messages, known)
            except ValueError as error:
                if "kv_pin" in asked:
                    raise
                logger.warning_once("nothing is pinned of a chat: %s", str(error))
                asked["kv_pin"] = 0
        wanted = {
            key: _indices(key, asked.pop(key), len(messages))
            for key in sorted(keys & MESSAGE_KEYS.keys())
        }
        stay, go = ({*wanted.get(key, ())} for key in MESSAGE_KEYS)
        if both := stay & go:
            keep, drop = MESSAGE_KEYS
            raise wrong(drop, min(both), f"no message of {keep}")
        for key, indices in wanted.items():
            ranges = MESSAGE_KEYS[key]
            found = [*sum(ranges_of(ranges, asked.get(ranges, [])), ())]
            for index in dict.fromkeys(indices):
                found += await message_tokens(render, messages, known, key, index)
            asked[ranges] = found
    request.vllm_xargs = asked


async def system_tokens(
    render: Render, messages: Sequence[Any], known: Sequence[int]
) -> int:
    """Return the tokens before the first message that is not the system's.

    Raises:
        ValueError: the template leaves system messages out, puts them behind others, or
            refuses a chat of them and a question.
    """
    first = [*takewhile(lambda each: _role(each) in ROLES, messages)]
    replaced = [{**dict(each), "content": OTHER} for each in first]
    question = {"role": "user", "content": OTHER}
    try:
        other = await render([*first, question])
        without = await render([*replaced, question]) if first else other
    except Exception as error:  # of the template, or about the length
        raise wrong("kv_pin", SYSTEM, f"a chat that can be rendered: {error}") from None
    pinned = _num_equal(known, other)
    end = len(other) - _num_equal(other[::-1], without[::-1])  # of what they show
    if first and not 0 < end <= pinned:
        shown = "a chat template that begins with system messages; this one does not"
        raise wrong("kv_pin", SYSTEM, shown)
    return pinned


async def message_tokens(
    render: Render, messages: Sequence[Any], known: Sequence[int], key: str, index: int
) -> tuple[int, ...]:
    """Return the range of what the template makes of the content of a message, if any.

    Raises:
        ValueError: nothing of it shows, or the chat has no tokens without it.
    """
    if not dict(messages[index]).get("content"):  # but tool calls, perhaps
        return ()
    others = list(messages)
    others[index] = {**dict(messages[index]), "content": OTHER}
    other = await render(others)
    first = _num_equal(known, other)
    last = _num_equal(known[first:][::-1], other[first:][::-1])
    if first >= len(known) - last:
        raise wrong(key, index, "a message that the chat template shows")
    return first, len(known) - last


def _indices(key: str, value: Any, count: int) -> Sequence[int]:
    is_list = isinstance(value, list) and len(value) <= MOST_RANGES
    if not (is_list and all(type(n) is int and 0 <= n < count for n in value)):
        most = f"up to {MOST_RANGES} indices of messages"
        raise wrong(key, value, f"a list of {most}, each from 0 to {count - 1}")
    return value


def _num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens are alike."""
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _role(message: Any) -> str:
    return message["role"] if isinstance(message, dict) else message.role
