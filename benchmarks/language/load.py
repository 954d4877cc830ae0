"""Questions asked within long answers, while the pool of the KV cache is too small.

A request has the text of a problem of `tasks` as its prompt. Its answer is given:
stretches of a book, and behind each of them one of the problem's questions with the
right answer. All requests come at once, engines are set up as servers are by default
(full KV is stock vLLM, with its own blocks), and the pool has a share of the bytes that
all of them need. vLLM decodes the answer
token by token; each is scored by what was predicted before it was forced. An answer to
a question is right if greedy decoding gives it there, as in `tasks`. Policies decode
the same tokens, so right answers and tokens per second are of one and the same load.
"""

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from benchmarks.language import tasks
from benchmarks.language.engines import Asker, Predicted, dropped_of
from benchmarks.language.losses import DIGITS, losses_of
from benchmarks.language.tasks import Ids
from benchmarks.language.texts import BOOK_NAMES, Encode, Text

LENGTH = 2048
"""Tokens of a prompt; all chosen tasks have problems of that length."""
STRETCH = 96
"""Tokens of a book before each question."""


@dataclass(frozen=True)
class Told:
    """A prompt and its answer.

    Attributes:
        text_ids: tokens of the prompt.
        said_ids: tokens of the answer.
        scored: first and last token, plus one, of each answer to a question, within
            `said_ids`.
    """

    id: str
    kind: str
    text_ids: Ids
    said_ids: Ids
    scored: tuple[tuple[int, int], ...]

    @property
    def token_ids(self) -> Ids:
        """Prompt and answer."""
        return self.text_ids + self.said_ids

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the token ids."""
        return sha256(repr(self.token_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answered:
    """How the answers of a request were predicted; see `tasks.Answered`.

    Attributes:
        speed: tokens per second that the engine decoded, over all requests.
    """

    losses: np.ndarray
    is_right: np.ndarray
    held: float
    speed: float


def chosen(
    encode: Encode, texts: Sequence[Text], count: int, kinds: Collection[str] = ()
) -> list[Told]:
    """Return so many requests of each chosen task; see `tasks.problems`."""
    books = [text.token_ids[1:] for text in texts if text.kind in BOOK_NAMES]
    return [
        _told(problem, books)
        for task, lengths in tasks.CHOSEN.items()
        if LENGTH in lengths
        for problem in tasks.problems(task, LENGTH, count, tasks.SEED, encode, texts)
    ]


def _told(problem: tasks.Problem, books: Sequence[Ids]) -> Told:
    """Return a problem whose questions stand within an answer."""
    book = random.Random(f"load/{problem.id}").choice(books)
    said: list[int] = []
    scored = []
    for number, (question, answer) in enumerate(problem.asked):
        said += book[number * STRETCH :][:STRETCH] + question
        scored.append((len(said), len(said) + len(answer)))
        said += answer
    return Told(problem.id, problem.kind, problem.text_ids, tuple(said), tuple(scored))


def measure(
    asker: Asker, policy: str, budget: int, items: Sequence[Told]
) -> list[Answered]:
    """Return how answers were predicted, all requests at once.

    Raises:
        RuntimeError: the engine has decoded another token than it was told.
    """
    began = time.monotonic()
    outputs = asker.ask(
        [one.text_ids for one in items],
        policy,
        budget,
        forced=[one.said_ids for one in items],
        salts=[f"{policy}/{budget}"] * len(items),
        ignore_eos=True,
        logprobs=1,
    )
    tokens = sum(len(one.said_ids) for one in items)
    speed = tokens / (time.monotonic() - began)
    return [
        _answered(one, output, speed)
        for one, output in zip(items, outputs, strict=True)
    ]


def _answered(told: Told, output: Any, speed: float) -> Answered:
    """Return how a request's answers were predicted."""
    (said,) = output.outputs
    if tuple(said.token_ids) != told.said_ids:
        raise RuntimeError(f"{told.id}: decoded other tokens than it was told")
    entries = [{t: one.logprob for t, one in each.items()} for each in said.logprobs]
    losses = losses_of(entries, told.said_ids)
    is_top = -losses >= np.array([max(entry.values()) for entry in entries])
    read = Predicted([{}] * (len(told.token_ids) - 1), dropped_of(output))
    return Answered(
        np.array([losses[start:end].mean() for start, end in told.scored]),
        np.array([is_top[start:end].all() for start, end in told.scored]),
        read.held_share(len(told.text_ids) - 1),
        speed,
    )


def figures(answered: Answered, budget: int, interval: int) -> dict[str, Any]:
    """Return what is kept of the answers.

    Returns:
        `right`: share of the answers; `loss`: their mean, nats; `held`: KV tokens that
        the answer's tokens read, beside full KV's; `speed`.
    """
    return {
        "right": round(float(answered.is_right.mean()), DIGITS),
        "loss": round(float(answered.losses.mean()), DIGITS),
        "held": round(answered.held, DIGITS),
        "speed": round(answered.speed, 1),
    }
