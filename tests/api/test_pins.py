"""What a chat pins of its system messages, found by rendering its beginning twice."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvpolicy.api import pins
from vllm_kvpolicy.config import KVPolicyConfig

TOOLS = [{"name": "look_up"}]
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": [{"type": "text", "text": "In verse."}]}
USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "So."}


def text_of(message: dict[str, Any]) -> str:
    parts = message["content"]
    if not isinstance(parts, str):
        parts = "".join(part["text"] for part in parts)
    return f"<{message['role']}>{parts}"


async def render(messages: list[Any], tool_dicts: Any = None, **_: Any) -> Any:
    """Render as a template with a token for each character; it needs a question."""
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("template: no question")
    tools = "".join(tool["name"] for tool in tool_dicts or ())
    text = f"[{tools}]" + "".join(map(text_of, messages)) + "<assistant>"
    return messages, [{"prompt_token_ids": list(map(ord, text))}]


def pinned(messages: list[Any], tools: Any = None, xargs: Any = None) -> int:
    request = SimpleNamespace(vllm_xargs=xargs)
    listed = pins.listed(messages)

    async def ask() -> None:
        _, (prompt,) = await render(listed, tools)
        options = {"tool_dicts": tools, "parser": object()}
        await pins.pin_system(render, request, listed, prompt, (), options)

    asyncio.run(ask())
    assert {**request.vllm_xargs, "kv_pin": None} == {**(xargs or {}), "kv_pin": None}
    return request.vllm_xargs["kv_pin"]


@pytest.mark.parametrize(
    ("first", "tools"),
    [([], None), ([SYSTEM], None), ([SYSTEM], TOOLS), ([SYSTEM, DEVELOPER], TOOLS)],
)
def test_it_ends_where_the_first_other_message_begins(first, tools):
    whole = "[" + "look_up" * bool(tools) + "]" + "".join(map(text_of, first))
    for rest in ([USER], [USER, ANSWER, SYSTEM, USER]):
        assert pinned([*first, *rest], tools) == len(whole + "<user>")


def test_parts_that_can_be_read_once_are_read_twice():
    once = {**SYSTEM, "content": iter([{"type": "text", "text": "Be brief."}])}
    assert pinned([once, USER]) == len("[]<system>Be brief.<user>")


def test_other_keys_stay():
    assert pinned([SYSTEM, USER], xargs={"kv_budget": 96, "kv_pin": "system"}) > 20


def test_a_template_that_fails_pins_nothing(policy_log):
    """The chat itself has been rendered, and is answered."""
    request = SimpleNamespace(vllm_xargs=None)

    async def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("prompt is too long")

    prompt = {"prompt_token_ids": [1, 2]}
    asyncio.run(pins.pin_system(fails, request, [SYSTEM], prompt, (), {}))
    assert request.vllm_xargs == {"kv_pin": 0}
    assert "nothing is pinned of a chat: prompt is too long" in policy_log.messages


@pytest.mark.parametrize(
    ("pin", "fields", "wants"),
    [
        (None, {"vllm_xargs": None}, False),
        ("system", {"vllm_xargs": None}, True),
        ("none", {"vllm_xargs": {"kv_pin": "system"}}, True),
        ("system", {"vllm_xargs": {"kv_pin": 64}}, False),
        ("system", {"vllm_xargs": {"kv_policy": "none"}}, False),
        ("system", {"vllm_xargs": None, "use_beam_search": True}, False),
        ("system", {}, False),  # what counts tokens takes no such keys
        ("system", {"vllm_xargs": {"kv_policy": "dms"}}, False),  # masks at once
        ("none", {"vllm_xargs": {"kv_policy": "dms", "kv_pin": "system"}}, True),
    ],
)
def test_who_wants_it(pin, fields, wants):
    policy = {"policy": "tova", "pin": pin}
    policy["policy_config"] = {"allow": ["dms"], "exact": True}
    server = SimpleNamespace(additional_config={"kv_policy": policy})
    assert pins.wants_system(server, SimpleNamespace(**fields)) == wants
    assert not pins.wants_system(
        SimpleNamespace(additional_config={}), SimpleNamespace(**fields)
    )


@pytest.mark.parametrize(("kind", "serves"), [("gpt_oss", True), ("qwen3", False)])
def test_servers_without_a_template_are_refused(kind, serves):
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=kind))
    engine = SimpleNamespace(model_config=model)
    config = KVPolicyConfig("tova", pin="system")
    with pytest.raises(ValueError, match="kv_pin: got 'system', .* template"):
        pins.check_server(config, engine, serves)
    pins.check_server(KVPolicyConfig("tova", pin="prompt"), engine, serves)
    model.hf_config.model_type = "qwen3"
    pins.check_server(config, engine, True)
