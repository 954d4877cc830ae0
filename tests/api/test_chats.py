"""Which tokens of a chat are those of a message, found by rendering it twice."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.logger import _print_warning_once

from vllm_kvpolicy.api import chats
from vllm_kvpolicy.api.request_guards import KVPolicyRequestError
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import MESSAGE_KEYS

TOOLS = [{"name": "look_up"}]
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": [{"type": "text", "text": "In verse."}]}
USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "So."}


def text_of(message: dict[str, Any]) -> str:
    parts = message["content"] or ""
    if not isinstance(parts, str):
        parts = "".join(part["text"] for part in parts)
    return f"<{message['role']}>{parts}"


def tokens_of(messages: list[Any], tools: Any = None) -> list[int]:
    """Return a token for each character of a template that needs a question."""
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("template: no question")
    names = "".join(tool["name"] for tool in tools or ())
    return list(map(ord, f"[{names}]{''.join(map(text_of, messages))}<assistant>"))


def put(
    messages: list[Any],
    xargs: Any,
    tools: Any = None,
    tokens_of: Any = tokens_of,
    **fields: Any,
) -> dict[str, Any]:
    """Return the keys of a chat after its tokens are known."""
    request = SimpleNamespace(vllm_xargs=xargs, **fields)
    listed = chats.listed(messages)

    async def render(others: list[Any]) -> list[int]:
        return tokens_of(others, tools)

    keys = {"kv_pin", *(xargs or {})} & {"kv_pin", *MESSAGE_KEYS}
    known = tokens_of(listed, tools)
    asyncio.run(chats.put_tokens(keys, render, request, listed, known))
    return request.vllm_xargs


@pytest.mark.parametrize(
    ("first", "tools"),
    [([], None), ([SYSTEM], None), ([SYSTEM], TOOLS), ([SYSTEM, DEVELOPER], TOOLS)],
)
def test_it_ends_where_the_first_other_message_begins(first, tools):
    whole = "[" + "look_up" * bool(tools) + "]" + "".join(map(text_of, first))
    for rest in ([USER], [USER, ANSWER, SYSTEM, USER]):
        asked = put([*first, *rest], None, tools)
        assert asked == {"kv_pin": len(whole + "<user>")}


def test_parts_that_can_be_read_once_are_read_twice():
    once = {**SYSTEM, "content": iter([{"type": "text", "text": "Be brief."}])}
    assert put([once, USER], None) == {"kv_pin": len("[]<system>Be brief.<user>")}


def test_messages_become_ranges_of_their_content():
    """Also of a message that says the same as another, and beside ranges of tokens."""
    chat = [SYSTEM, USER, ANSWER, USER]
    text = "".join(map(chr, tokens_of(chat)))
    asked = {"kv_keep_messages": [0, 3], "kv_keep": [1, 2], "kv_budget": 96}
    found = put(chat, {**asked, "kv_drop_messages": [2]})
    ranges = [
        (text.index("Be brief."), text.index("<user>")),
        (text.rindex("Why?"), text.rindex("<assistant>")),
    ]
    assert found["kv_keep"] == [1, 2, *ranges[0], *ranges[1]]
    first, end = found["kv_drop_first"]
    assert text[first:end] == "So."
    assert found.keys() == {"kv_keep", "kv_drop_first", "kv_budget", "kv_pin"}


@pytest.mark.parametrize(
    ("index", "valid"),
    [(3, "from 0 to 2"), (-1, "from 0 to 2"), ("1", "indices"), (0, "shows")],
)
def test_messages_that_cannot_be_found_are_refused(index, valid):
    """The template leaves the first one out."""
    chat = [SYSTEM, USER, ANSWER]
    with pytest.raises(KVPolicyRequestError, match=f"kv_keep_messages: got .*{valid}"):
        put(chat, {"kv_keep_messages": [index]}, tokens_of=without_system)


@pytest.mark.parametrize("content", ["", None])
def test_of_a_message_without_text_nothing_stays_or_goes(content):
    chat = [USER, {"role": "assistant", "content": content}, USER]
    assert put(chat, {"kv_drop_messages": [1]})["kv_drop_first"] == []


def test_a_message_cannot_stay_and_go():
    asked = {"kv_keep_messages": [0, 2], "kv_drop_messages": [1, 2]}
    words = "kv_drop_messages: got 2, expected no message of kv_keep_messages"
    with pytest.raises(KVPolicyRequestError, match=words):
        put([SYSTEM, USER, ANSWER], asked)


@pytest.mark.parametrize("key", ["kv_pin", *MESSAGE_KEYS])
def test_what_is_found_in_a_whole_prompt_is_refused_for_a_cut_one(key):
    asked = {"kv_pin": "system"} if key == "kv_pin" else {key: [0]}
    other = MESSAGE_KEYS.get(key, "a number")
    words = f"{key}: got .*, expected {other}, .* by truncate_prompt_tokens"
    with pytest.raises(KVPolicyRequestError, match=words):
        put([SYSTEM, USER], asked, truncate_prompt_tokens=20)
    put([SYSTEM, USER], None, truncate_prompt_tokens=20)  # of the server: not asked for


def without_system(messages: list[Any], tools: Any) -> list[int]:
    """A template that leaves system messages out."""
    return tokens_of([each for each in messages if each["role"] != "system"], tools)


def system_last(messages: list[Any], tools: Any) -> list[int]:
    """A template that puts system messages before the last question."""
    *others, last = [each for each in messages if each["role"] != "system"]
    system = [each for each in messages if each["role"] == "system"]
    return tokens_of([*others, *system, last], tools)


def too_long(messages: list[Any], tools: Any) -> list[int]:
    if messages[-1]["content"] == chats.OTHER:
        raise ValueError("prompt is too long")
    return tokens_of(messages, tools)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (without_system, "this one does not"),
        (system_last, "this one does not"),
        (too_long, "prompt is too long"),
    ],
)
def test_a_template_of_which_nothing_can_be_pinned(template, words, policy_log):
    """Who asks for it is told; the server's own pin is written to its log."""
    _print_warning_once.cache_clear()
    chat = [SYSTEM, USER, ANSWER, USER]
    with pytest.raises(KVPolicyRequestError, match=f"kv_pin: got 'system', .*{words}"):
        put(chat, {"kv_pin": "system"}, tokens_of=template)
    for _ in range(2):
        assert put(chat, None, tokens_of=template) == {"kv_pin": 0}
    said = "nothing is pinned of a chat: kv_pin: got 'system'"
    assert policy_log.text.count(said) == 1
    if template is without_system:
        assert put([USER], {"kv_pin": "system"}, tokens_of=template)["kv_pin"] > 0


def test_a_system_message_may_be_the_templates_own():
    def with_default(messages: list[Any], tools: Any) -> list[int]:
        has_own = messages[0]["role"] == "system"
        return tokens_of(messages if has_own else [SYSTEM, *messages], tools)

    asked = put([SYSTEM, USER], {"kv_pin": "system"}, tokens_of=with_default)
    assert asked == {"kv_pin": len("[]<system>Be brief.<user>")}


def test_a_template_may_ask_for_a_system_message():
    def demanding(messages: list[Any], tools: Any) -> list[int]:
        if messages[0]["role"] != "system":
            raise ValueError("template: no system message")
        return tokens_of(messages, tools)

    asked = put([SYSTEM, USER], {"kv_pin": "system"}, tokens_of=demanding)
    assert asked == {"kv_pin": len("[]<system>Be brief.<user>")}


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
    found = chats.wants(server, SimpleNamespace(**fields))
    assert found == ({"kv_pin"} if wants else set())
    stock = SimpleNamespace(additional_config={})
    assert not chats.wants(stock, SimpleNamespace(**fields))


@pytest.mark.parametrize("hints", [True, False])
def test_messages_are_looked_for_where_hints_are_served(hints):
    policy = {"policy": "tova", "policy_config": {"hints": hints}}
    server = SimpleNamespace(additional_config={"kv_policy": policy})
    xargs = {"kv_drop_messages": [1], "kv_keep": [1, 2]}
    chat = SimpleNamespace(vllm_xargs=xargs, messages=[USER])
    assert chats.wants(server, chat) == ({"kv_drop_messages"} if hints else set())
    assert not chats.wants(server, SimpleNamespace(vllm_xargs=xargs, input="Why?"))


@pytest.mark.parametrize(("kind", "serves"), [("gpt_oss", True), ("qwen3", False)])
def test_servers_without_a_template_are_refused(kind, serves):
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=kind))
    engine = SimpleNamespace(model_config=model)
    config = KVPolicyConfig("tova", pin="system")
    with pytest.raises(ValueError, match="kv_pin: got 'system', .* template"):
        chats.check_server(config, engine, serves)
    chats.check_server(KVPolicyConfig("tova", pin="prompt"), engine, serves)
    model.hf_config.model_type = "qwen3"
    chats.check_server(config, engine, True)


@pytest.mark.parametrize("xargs", ["none", {"kv_pin": "system"}, {"kv_pin": 7}])
def test_tokens_are_counted_whatever_stands_beside(xargs):
    server = SimpleNamespace(additional_config={"kv_policy": {"policy": "tova"}})
    request = TokenizeChatRequest(messages=[USER], vllm_xargs=xargs)
    assert chats.wants(server, request) == set()
