"""Asks fixed questions whose answers are known, one per policy.

A float32 sum depends on what else is in the batch, so under load two tokens that are
nearly as likely may change places, in stock vLLM as well. So that a changed answer
means a fault, probes are asked in quiet moments, all at once and always the same ones,
and the question of each policy is the one of several CANDIDATES whose closest decision
is clearest: MARGIN is a thousand times what the order of a sum changes in a logarithm
of a probability. Every other time the questions bring a salt of their own, with which
they find nothing in the prefix cache; the other times they may read blocks that
requests left there.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.load import open_session
from reasoner.problems import generate

CANDIDATES = 3
LINES = 28
ANSWER_TOKENS = 110
"""Prompt and answer are 230 tokens: one or two events."""
MARGIN = 0.01


class NoProbe(Exception):
    """No question has an answer that is clear enough."""


@dataclass(frozen=True)
class Probe:
    """A question and its answer.

    Attributes:
        policy: that the question asks for; None where the server has none.
        margin: smallest difference between the logarithms of the probabilities of the
            token that was chosen and the next one.
    """

    policy: str | None
    prompt: str
    text: str
    margin: float


async def record(url: str, policies: tuple[str | None, ...]) -> list[Probe]:
    """Return a probe of each policy of an idle server.

    Args:
        policies: that requests may ask for; None for a request without the key.

    Raises:
        NoProbe: a policy has none.
    """
    prompts = [generate("copy", LINES, seed).prompt for seed in range(CANDIDATES)]
    probes = []
    async with open_session(url) as session:
        for number, prompt in enumerate(prompts):
            salt = f"record {number}"
            asked = [ask(session, policy, prompt, salt) for policy in policies]
            probes += await asyncio.gather(*asked)
    best = [
        max((p for p in probes if p.policy == policy), key=lambda p: p.margin)
        for policy in policies
    ]
    for probe in best:
        if probe.margin < MARGIN:
            raise NoProbe(f"{probe.policy}: the clearest margin is {probe.margin}")
    return best


async def ask(
    session: aiohttp.ClientSession, policy: str | None, prompt: str, salt: str | None
) -> Probe:
    """Ask a question, greedily.

    Args:
        salt: of the prefix cache, of which only requests with it share blocks.
    """
    body: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": prompt}],
        **{"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True},
        **{"logprobs": True, "top_logprobs": 2},
    }
    if policy is not None:
        body["vllm_xargs"] = {"kv_policy": policy}
    if salt is not None:
        body["cache_salt"] = salt
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise NoProbe(f"{policy}: {response.status} {await response.text()}")
        choice = (await response.json())["choices"][0]
    tokens = choice["logprobs"]["content"]
    gaps = [
        token["top_logprobs"][0]["logprob"] - token["top_logprobs"][1]["logprob"]
        for token in tokens
    ]
    text = "".join(token["token"] for token in tokens)
    return Probe(policy, prompt, text, min(map(abs, gaps)))


async def check(
    url: str, probes: list[Probe], moment: int
) -> tuple[list[float], list[str | None]]:
    """Ask all probes of an idle server again.

    Args:
        moment: number of the quiet moment; odd ones find nothing in the cache.

    Returns:
        Seconds that each answer took, and by probe what has changed, None if nothing
        has.
    """
    salt = f"moment {moment}" if moment % 2 else None
    seconds = []

    async def changed(probe: Probe) -> str | None:
        began = time.perf_counter()
        try:
            found = await ask(session, probe.policy, probe.prompt, salt)
        except NoProbe as error:
            return str(error)
        seconds.append(time.perf_counter() - began)
        return None if found.text == probe.text else difference(probe, found, salt)

    async with open_session(url) as session:
        return seconds, await asyncio.gather(*map(changed, probes))


def difference(known: Probe, now: Probe, salt: str | None) -> str:
    """Return where two answers to a question part."""
    pairs = enumerate(zip(known.text, now.text, strict=False))
    place = next((at for at, (a, b) in pairs if a != b), len(known.text))
    where = "a cold cache" if salt else "a cache that may be warm"
    return (
        f"with {known.policy} and {where} the answer to {known.prompt!r} is "
        f"{now.text[place:][:40]!r} from character {place} on, was "
        f"{known.text[place:][:40]!r}"
    )
