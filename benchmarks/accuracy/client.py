"""Sends the requests of an accuracy run, retries them and scores the answers."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.accuracy.questions import Question
from benchmarks.accuracy.scoring import Equal, judge
from benchmarks.load import LoadError, open_session

TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}
LONGEST_PAUSE = 60.0
NGRAMS = (4, 8, 20)
"""Sizes of the n-grams whose repetition is measured."""

Line = dict[str, Any]


def repeated(tokens: Sequence[int]) -> dict[str, float]:
    """Return 1 - unique / all n-grams of an answer for each n, 0 of a shorter answer.

    AMS (arXiv 2605.23200) reports repetition without defining it.
    """
    found = {}
    for size in NGRAMS:
        grams = list(zip(*(tokens[i:] for i in range(size)), strict=False))
        rate = 1 - len(set(grams)) / len(grams) if grams else 0.0
        found[str(size)] = round(rate, 4)
    return found


@dataclass(frozen=True)
class Asked:
    """One request to send.

    Attributes:
        key: fields that name the output line.
        sample: number of the answer among several to the same question.
        extra: `vllm_xargs`, or None.
    """

    key: Line
    question: Question
    sample: int
    extra: dict[str, Any] | None


@dataclass(frozen=True)
class Client:
    """Sends requests with fixed settings.

    Attributes:
        timeout: seconds for one try.
        tries: tries of one request, at least 1.
        pause: seconds before the second try; doubled for each further one.
        temperature: 0 for greedy decoding.
        max_tokens: most tokens of an answer; None for each question's limit.
        max_failures: problems that may fail before the run stops.
    """

    concurrency: int = 16
    timeout: float = 600.0
    tries: int = 5
    pause: float = 1.0
    temperature: float = 0.0
    max_tokens: int | None = None
    max_failures: int = 20
    model: str = "model"
    equal: Equal | None = None

    def body(self, asked: Asked) -> Line:
        """Return the request's body, always the same for the same request."""
        question = asked.question
        name = f"{question.task}/{question.id}/{asked.sample}"
        digest = hashlib.sha256(name.encode()).digest()
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question.prompt}],
            "temperature": self.temperature,
            "seed": int.from_bytes(digest[:4]) >> 1,
            "max_tokens": self.max_tokens or question.max_tokens,
            "return_token_ids": True,
        }
        return body | ({"vllm_xargs": asked.extra} if asked.extra else {})

    async def ask(self, session: aiohttp.ClientSession, asked: Asked) -> Line:
        """Send one request, retry it if needed, and score the answer.

        Returns:
            A complete output line.

        Raises:
            LoadError: it was refused, or failed `tries` times.
        """
        for attempt in range(1, self.tries + 1):
            start = time.monotonic()
            try:
                answer = await self._post(session, self.body(asked))
                line = self._line(asked, answer)
            except _PassingError as error:
                if attempt == self.tries:
                    raise LoadError(f"{error}, {attempt} times") from None
                wait = self.pause * 2 ** (attempt - 1)
                await asyncio.sleep(min(max(wait, error.wait), LONGEST_PAUSE))
            else:
                seconds = round(time.monotonic() - start, 3)
                return line | {"seconds": seconds, "tries": attempt}
        raise ValueError(f"tries: expected at least 1, got {self.tries}")

    async def _post(self, session: aiohttp.ClientSession, body: Line) -> Any:
        limit = aiohttp.ClientTimeout(total=self.timeout)
        try:
            async with session.post(
                "/v1/chat/completions", json=body, timeout=limit
            ) as response:
                if response.status == 200:
                    return await response.json()
                text = (await response.text())[:300]
        except TimeoutError:
            raise _PassingError(f"no answer within {self.timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from None
        message = f"HTTP {response.status}: {text}"
        if response.status in TRANSIENT_STATUSES:
            raise _PassingError(message, response.headers.get("Retry-After", ""))
        raise LoadError(message)

    def _line(self, asked: Asked, answer: Any) -> Line:
        """Return the output line of a scored answer."""
        try:
            (choice,) = answer["choices"]
            text = choice["message"]["content"] or ""
            usage, reason = answer["usage"], choice["finish_reason"]
            prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
        except (KeyError, TypeError, ValueError) as error:
            raise _PassingError(f"not a chat completion: {error!r}") from None
        if reason not in ("stop", "length"):
            raise _PassingError(f"finish reason {reason!r}")
        verdict = judge(asked.question, text, reason == "stop", self.equal)
        tokens = choice.get("token_ids")
        said = (answer.get("kv_transfer_params") or {}).get("kv_policy")
        return asked.key | {
            "correct": verdict.correct,
            "score": round(verdict.score, 4),
            "answer": verdict.answer,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "capped": reason == "length",
            "repeated": repeated(tokens) if tokens else None,
            "dropped": [[each[0], round(each[1], 3)] for each in said["dropped"]]
            if said
            else None,
            "expected": list(asked.question.answers),
            "text": text,
        }

    async def ask_all(
        self,
        url: str,
        wanted: Sequence[Asked],
        write: Callable[[Line], None],
        failures: list[str] | None = None,
    ) -> list[str]:
        """Send all requests, `concurrency` at a time.

        Args:
            failures: those of earlier calls count, too; new ones are added.

        Returns:
            A sentence for each problem that failed.

        Raises:
            LoadError: more than `max_failures` failed; the rest was not sent.
        """
        failures = [] if failures is None else failures
        remaining = iter(wanted)
        async with open_session(url) as session, asyncio.TaskGroup() as group:
            for _ in range(min(self.concurrency, len(wanted))):
                group.create_task(self._work(session, remaining, write, failures))
        if len(failures) > self.max_failures:
            raise LoadError(
                f"{len(failures)} problems failed, at most {self.max_failures} may; "
                f"the last: {failures[-1]}"
            )
        return failures

    async def _work(
        self,
        session: aiohttp.ClientSession,
        remaining: Iterator[Asked],
        write: Callable[[Line], None],
        failures: list[str],
    ) -> None:
        for asked in remaining:
            try:
                write(await self.ask(session, asked))
            except LoadError as error:
                question = asked.question
                failures.append(f"{question.task} {question.id}: {error}")
            if len(failures) > self.max_failures:
                return


class _PassingError(Exception):
    """An error that another try may fix.

    Attributes:
        wait: seconds that the server asks to wait, 0 if it does not.
    """

    def __init__(self, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.wait = float(retry_after) if retry_after.isdigit() else 0.0
