"""Sends requests at once, some of whose clients leave early, and judges the answers."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.load import DATA_PREFIX, DONE, open_session
from benchmarks.soak.asks import CHAT, CHOICES, COMPLETIONS, PATTERN, SCHEMA, Ask
from benchmarks.soak.promises import ANSWERS, REFUSALS, STRUCTURE, Ledger

AT_ONCE = 16
ANSWER_SECONDS = 300.0
LEFT = "left"


@dataclass(frozen=True)
class Outcome:
    """What became of a request.

    Attributes:
        status: HTTP status, 0 where the connection broke, None if its client left.
        payload: text of the answer, or its events as JSON.
    """

    status: int | None
    payload: Any


async def play(url: str, wave: Sequence[Ask]) -> list[Outcome]:
    """Send the requests of a wave, AT_ONCE at a time.

    Returns:
        Outcomes in the order of the requests.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def send(ask: Ask) -> Outcome:
        async with places:
            try:
                patience = ANSWER_SECONDS if ask.leaves is None else ask.leaves
                return await asyncio.wait_for(post(session, ask), patience)
            except TimeoutError:
                late = f"no end after {ANSWER_SECONDS:.0f} s"
                return Outcome(0, late) if ask.leaves is None else Outcome(None, LEFT)
            except (aiohttp.ClientError, OSError) as error:
                return Outcome(0, repr(error))

    # After an HTTP 500, vLLM closes the connection without saying so: the next request
    # on it would be reset.
    async with open_session(url, has_reuse=False) as session:
        return await asyncio.gather(*map(send, wave))


async def post(session: aiohttp.ClientSession, ask: Ask) -> Outcome:
    """Send one request and read its answer to the end."""
    async with session.post(ask.path, json=ask.body) as response:
        if response.content_type != "text/event-stream":
            return Outcome(response.status, await response.text())
        events = []
        async for line in response.content:
            if line.startswith(DATA_PREFIX):
                data = line.removeprefix(DATA_PREFIX).strip()
                events.append({"done": True} if data == DONE else json.loads(data))
        return Outcome(response.status, events)


def judge(ask: Ask, outcome: Outcome, ledger: Ledger) -> None:
    """Check what a request got.

    Raises:
        BrokenPromise: it should have got something else.
    """
    if outcome.status is None:
        return
    said = f"{ask.kind} got {outcome.status} {str(outcome.payload)[:600]}"
    said += f", asked {ask.path} {json.dumps(ask.body)[:600]}"
    if ask.refused is not None:
        ledger.check(REFUSALS, is_refusal(ask.refused, outcome), said)
        return
    ledger.check(ANSWERS, outcome.status == 200 and is_whole(ask, outcome), said)
    if ask.structure is not None:
        for text in finished_texts(ask, outcome.payload):
            ledger.check(STRUCTURE, has_structure(ask.structure, text), said)


def is_refusal(key: str, outcome: Outcome) -> bool:
    """Return whether an answer is an HTTP 400 with one line that has a word."""
    if outcome.status != 400 or not isinstance(outcome.payload, str):
        return False
    message = json.loads(outcome.payload)["error"]["message"]
    return key in message and "\n" not in message


def is_whole(ask: Ask, outcome: Outcome) -> bool:
    """Return whether an answer has an end, and of every choice one."""
    payload = outcome.payload
    if isinstance(payload, list) and any("error" in event for event in payload):
        return False
    if ask.path in (COMPLETIONS, CHAT):
        prompts = ask.body.get("prompt")
        several = isinstance(prompts, list) and isinstance(prompts[0], str)
        wanted = ask.body.get("n", 1) * (len(prompts) if several else 1)
        reasons = [reason for _, _, reason in _choices(payload) if reason]
        return len(reasons) == wanted and set(reasons) <= {"stop", "length"}
    if isinstance(payload, str):
        body = json.loads(payload)
        return body.get("status") in ("completed", "incomplete") or bool(
            body.get("stop_reason")
        )
    kinds = {event.get("type") for event in payload}
    return bool(kinds & {"response.completed", "response.incomplete", "message_stop"})


def finished_texts(ask: Ask, payload: Any) -> list[str]:
    """Return the texts of those choices that ended by themselves."""
    texts: dict[int, str] = {}
    stopped = set()
    for index, text, reason in _choices(payload):
        texts[index] = texts.get(index, "") + text
        if reason == "stop":
            stopped.add(index)
    return [texts[index] for index in sorted(stopped)]


def _choices(payload: Any) -> list[tuple[int, str, str | None]]:
    """Return (index, text, finish reason) of the choices of an answer or a stream."""
    events = payload if isinstance(payload, list) else [json.loads(payload)]
    return [
        (choice["index"], choice.get("text") or "", choice.get("finish_reason"))
        for event in events
        for choice in event.get("choices") or ()
    ]


def has_structure(kind: str, text: str) -> bool:
    """Return whether a text is what `asks` asks for."""
    if kind == "choice":
        return text in CHOICES
    if kind == "regex":
        return re.fullmatch(PATTERN, text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    limits = SCHEMA["properties"]["a"]  # type: ignore[index]
    is_object = isinstance(value, dict) and set(value) == {"a"}
    number = value["a"] if is_object else None
    return type(number) is int and limits["minimum"] <= number <= limits["maximum"]
