"""Draws the requests of a wave: a seed and a number give the same ones again."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.soak import settings
from reasoner.problems import FAMILIES, generate
from vllm_kvpolicy.policies.names import parse

Body = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LEAVING_SHARE, STREAMED_SHARE, KNOBS_SHARE = 0.3, 0.5, 0.7
LONGEST_PATIENCE = 2.0
"""Seconds after which a client that leaves has left, at most."""
PREFIXES = 3
"""Long prompts begin with one of so many texts, which the prefix cache may hold."""
KNOBS = {
    "budget": (settings.LEAST_BUDGET, settings.BUDGET),
    "interval": (settings.LEAST_INTERVAL, settings.INTERVAL),
    "recent": (8, settings.RECENT),
    "sinks": (0, settings.SINKS),
}
"""Range of each number that all policies accept unless they fix it."""
CHOICES = ["yes", "no", "perhaps"]
PATTERN = "[ab]{2,9}-[0-9]{2}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
BAD_KNOBS: tuple[tuple[str, Any], ...] = (
    ("kv_budget", "many"),
    ("kv_budget", settings.BUDGET + 1),
    ("kv_budget", 1),
    ("kv_budget", -(2**62)),
    ("kv_budget", 96.5),
    ("kv_budget", True),
    ("kv_interval", 0),
    ("kv_interval", settings.INTERVAL * 2),
    ("kv_interval", [1, 2]),
    ("kv_recent", -1),
    ("kv_sinks", 10**9),
    ("kv_policy", "snapkvv"),
    ("kv_policy", "tova\nx"),
    ("kv_policy", ""),
    ("kv_policy", 7),
    ("kv_bugdet", 64),
)


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        kind: what is special about it, for counts.
        leaves: seconds after which its client closes the connection; None if it reads
            the answer to the end.
        structure: `json`, `choice` or `regex` that a finished answer must have.
        refused: key that an HTTP 400 must name; None for an answer.
    """

    kind: str
    path: str
    body: Body
    leaves: float | None = None
    structure: str | None = None
    refused: str | None = None

    def without_knobs(self) -> "Ask":
        """Return the request as stock vLLM takes it."""
        if not isinstance(self.body, dict):  # a malformed one
            return self
        body = {key: value for key, value in self.body.items() if key != "vllm_xargs"}
        return replace(self, body=body, refused=None)


def draw_wave(seed: int, number: int, count: int) -> list[Ask]:
    """Return the requests of a wave."""
    rng = random.Random(f"{seed}/wave/{number}")
    makers = [maker for maker, weight in MAKERS for _ in range(weight)]
    return [_finish(rng, rng.choice(makers)(rng)) for _ in range(count)]


def _finish(rng: random.Random, ask: Ask) -> Ask:
    """Add what any request may have: a priority, knobs, and a client that leaves."""
    body = {**ask.body, "model": "model"}
    is_sampled = body.get("n", 1) > 1  # vLLM refuses several greedy answers
    body["temperature"] = rng.choice((0.7, 1) if is_sampled else (0, 0.7, 1))
    if ask.path != MESSAGES:
        body["priority"] = rng.randint(-3, 3)
    if ask.refused is None and "use_beam_search" not in body:
        if rng.random() < KNOBS_SHARE and ask.path != MESSAGES:
            body["vllm_xargs"] = draw_knobs(rng)
        if rng.random() < STREAMED_SHARE:
            body["stream"] = True
    leaves = None
    if ask.refused is None and rng.random() < LEAVING_SHARE:
        leaves = rng.uniform(0, LONGEST_PATIENCE)
    return replace(ask, body=body, leaves=leaves)


def draw_knobs(rng: random.Random) -> Body:
    """Return keys of a request that the server has to accept."""
    policy = rng.choice((*settings.POLICIES, settings.NO_POLICY))
    knobs: Body = {"kv_policy": policy}
    # With no policy no number has a meaning, and some policies fix some.
    fixed = KNOBS if policy == settings.NO_POLICY else parse(policy).fixed_keys
    for key, (least, most) in KNOBS.items():
        if key not in fixed and rng.random() < 0.4:
            knobs[f"kv_{key}"] = rng.randint(least, most)
    return knobs


def _text(rng: random.Random) -> str:
    """Return a problem, or part of one, sometimes behind one of a few long texts."""
    family = rng.choice(sorted(FAMILIES))
    text = generate(family, rng.randint(8, 24), rng.randrange(1000)).prompt
    if rng.random() < 0.4:
        head = generate("copy", 40, rng.randrange(PREFIXES)).prompt
        text = head.rpartition("?")[0] + text
    return text[: rng.randint(1, 300)]


def _length(rng: random.Random) -> int:
    return rng.choice((1, 2, rng.randint(1, 60), rng.randint(60, 160)))


def _plain(rng: random.Random) -> Ask:
    body = {"prompt": _text(rng), "max_tokens": _length(rng)}
    body |= {"ignore_eos": rng.random() < 0.5, "seed": rng.randrange(99)}
    return Ask("completion", COMPLETIONS, body)


def _several(rng: random.Random) -> Ask:
    body = {"prompt": _text(rng), "max_tokens": _length(rng), "n": rng.randint(2, 4)}
    return Ask("n > 1", COMPLETIONS, body)


def _prompts(rng: random.Random) -> Ask:
    prompts = [_text(rng) for _ in range(rng.randint(2, 3))]
    return Ask("list of prompts", COMPLETIONS, {"prompt": prompts, "max_tokens": 20})


def _token_ids(rng: random.Random) -> Ask:
    prompt = [rng.randrange(10, 300) for _ in range(rng.randint(1, 400))]
    body = {"prompt": prompt, "max_tokens": _length(rng), "logprobs": rng.randint(0, 3)}
    return Ask("token ids", COMPLETIONS, body)


def _chat(rng: random.Random) -> Ask:
    messages = [{"role": "user", "content": _text(rng)}]
    body = {"messages": messages, "max_tokens": _length(rng), "n": rng.randint(1, 2)}
    return Ask("chat", CHAT, body)


def _response(rng: random.Random) -> Ask:
    body = {"input": _text(rng), "max_output_tokens": max(_length(rng), 16)}
    return Ask("response", RESPONSES, body | {"store": False})


def _message(rng: random.Random) -> Ask:
    messages = [{"role": "user", "content": _text(rng)}]
    return Ask("message", MESSAGES, {"messages": messages, "max_tokens": _length(rng)})


def _beams(rng: random.Random) -> Ask:
    body = {"prompt": _text(rng), "max_tokens": 8, "n": 2, "use_beam_search": True}
    return Ask("beam search", COMPLETIONS, body)


def _structured(rng: random.Random, kind: str, value: Any) -> Ask:
    body = {"prompt": _text(rng), "max_tokens": 40, "structured_outputs": {kind: value}}
    return Ask(f"structured: {kind}", COMPLETIONS, body, structure=kind)


def _bad_knob(rng: random.Random) -> Ask:
    key, value = rng.choice(BAD_KNOBS)
    body = {"max_tokens": 8, "vllm_xargs": {key: value}, "stream": rng.random() < 0.5}
    if rng.random() < 0.5:
        return Ask("bad key", COMPLETIONS, body | {"prompt": "hello"}, refused=key)
    messages = [{"role": "user", "content": "hello"}]
    return Ask("bad key", CHAT, body | {"messages": messages}, refused=key)


MAKERS: tuple[tuple[Callable[[random.Random], Ask], int], ...] = (
    (_plain, 5),
    (_several, 2),
    (_prompts, 1),
    (_token_ids, 2),
    (_chat, 3),
    (_response, 1),
    (_message, 1),
    (_beams, 1),
    (partial(_structured, kind="json", value=SCHEMA), 1),
    (partial(_structured, kind="choice", value=CHOICES), 1),
    (partial(_structured, kind="regex", value=PATTERN), 1),
    (_bad_knob, 3),
)
