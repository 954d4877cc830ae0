"""Sends streaming requests to /v1/completions and times the arrival of every token."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

Result = TypeVar("Result")
Sample = Callable[[], dict[str, float]]
"""Reads a server's metrics."""
Played = tuple[list["Completion"], list[dict[str, float]]]
"""Completions, and samples of the metrics while they ran."""

SAMPLE_SECONDS = 0.5
LINE_BYTES = 2**20
IDLE_SECONDS = 2.0
"""For which a connection may idle: vLLM closes it after 5, perhaps as we send."""
DATA_PREFIX = b"data:"
DONE = b"[DONE]"


class LoadError(Exception):
    """A request that failed, or whose output has not the forced length."""


@dataclass
class Completion:
    """The output of one request.

    Attributes:
        started: time at which it was sent, in seconds of `time.perf_counter`.
        arrivals: time at which each token arrived; tokens of one chunk share theirs.
        finish_reason: `length` for a forced output.
        turn: its place in its conversation, from 1.
    """

    started: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    turn: int = 1


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of one line of a server-sent event stream.

    Returns:
        None for blank lines, comments, other fields and the end mark.

    Raises:
        LoadError: the server reports an error in the stream.
    """
    line = line.strip()
    if not line.startswith(DATA_PREFIX):
        return None
    data = line.removeprefix(DATA_PREFIX).strip()
    if data == DONE:
        return None
    event = json.loads(data)
    if "error" in event:
        raise LoadError(f"the stream carries an error: {event['error']}")
    return event


async def complete(
    session: aiohttp.ClientSession,
    prompt: Sequence[int],
    output_tokens: int,
    extra: dict[str, Any] | None = None,
) -> Completion:
    """Send one request and read its stream to the end.

    Args:
        session: a session whose base is the server's root.
        output_tokens: forced length of the output.
        extra: `vllm_xargs` of the request.

    Raises:
        LoadError: an HTTP error, or an output of another length.
    """
    body = {
        "model": "model",
        "prompt": list(prompt),
        "stream": True,
        "temperature": 0,
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **({"vllm_xargs": extra} if extra else {}),
    }
    result = Completion(started=time.perf_counter())
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise LoadError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            arrival = time.perf_counter()
            event = parse_event(line)
            for choice in event["choices"] if event else ():
                tokens = choice.get("token_ids") or []
                result.token_ids += tokens
                result.arrivals += [arrival] * len(tokens)
                result.finish_reason = choice["finish_reason"] or result.finish_reason
    if (len(result.token_ids), result.finish_reason) != (output_tokens, "length"):
        raise LoadError(
            f"forced {output_tokens} tokens, got {len(result.token_ids)} and the "
            f"finish reason {result.finish_reason!r}"
        )
    return result


async def run_together(
    url: str,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    sample: Sample,
    at_once: int | None = None,
    extra: dict[str, Any] | None = None,
) -> Played:
    """Send requests, all or some at once, and wait for the last token.

    Args:
        sample: reads the server's metrics; called in a thread every SAMPLE_SECONDS.
        at_once: most requests in flight, in the order of the prompts; None for all.

    Returns:
        Completions in the order of the prompts, and the samples.
    """
    places = asyncio.Semaphore(at_once or len(prompts))

    async def send(prompt: Sequence[int]) -> Completion:
        async with places:
            return await complete(session, prompt, output_tokens, extra)

    async with open_session(url) as session:
        return await sampled(asyncio.gather(*map(send, prompts)), sample)


async def run_conversations(
    url: str,
    conversations: Sequence[Sequence[Sequence[int]]],
    output_tokens: int,
    thinking_tokens: int,
    sample: Sample,
    extra: dict[str, Any] | None = None,
) -> Played:
    """Hold conversations at once; each sends its next turn when the last is answered.

    A prompt is everything before it, without the thinking, and a new message.

    Args:
        conversations: of each, the token ids of its user's messages.
        thinking_tokens: leading tokens of an answer that later prompts leave out.

    Returns:
        Completions, conversation by conversation, and the samples.
    """

    async def hold(messages: Sequence[Sequence[int]]) -> list[Completion]:
        prompt: list[int] = []
        found = []
        for turn, message in enumerate(messages, 1):
            prompt += message
            completion = await complete(session, prompt, output_tokens, extra)
            completion.turn = turn
            prompt += completion.token_ids[thinking_tokens:]
            found.append(completion)
        return found

    async with open_session(url) as session:
        work = asyncio.gather(*map(hold, conversations))
        held, samples = await sampled(work, sample)
    return [completion for found in held for completion in found], samples


async def sampled(
    work: Awaitable[Result], sample: Sample
) -> tuple[Result, list[dict[str, float]]]:
    """Wait for `work` and sample a server's metrics until it ends; see `run_together`.

    Raises:
        LoadError: sampling failed.
    """
    samples: list[dict[str, float]] = []
    sampler = asyncio.create_task(_keep_sampling(sample, samples))
    try:
        result = await work
    finally:
        sampler.cancel()
        ended = await asyncio.gather(sampler, return_exceptions=True)
    if not isinstance(ended[0], asyncio.CancelledError):
        raise LoadError(f"sampling the metrics failed: {ended[0]!r}")
    return result, samples


async def run_one_by_one(
    url: str,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    extra: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Send requests one after the other; see `complete` for the arguments.

    Returns:
        The output of each request, as token ids.
    """
    async with open_session(url) as session:
        return [
            (await complete(session, prompt, output_tokens, extra)).token_ids
            for prompt in prompts
        ]


def open_session(url: str, has_reuse: bool = True) -> aiohttp.ClientSession:
    """Return a client session without limits on connections or time.

    Args:
        has_reuse: whether a connection may carry several requests.
    """
    reuse: dict[str, Any] = {"keepalive_timeout": IDLE_SECONDS}
    return aiohttp.ClientSession(
        url,
        connector=aiohttp.TCPConnector(
            limit=0, **(reuse if has_reuse else {"force_close": True})
        ),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=LINE_BYTES,
    )


async def _keep_sampling(sample: Sample, samples: list[dict[str, float]]) -> None:
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        samples.append(await asyncio.to_thread(sample))
