"""Retrieval and few-shot tasks in long texts, asked behind the last event.

The text of a problem ends at a multiple of every interval, where an event is, and the
question follows: what is dropped is chosen before the question is seen, and nothing is
dropped between question and answer. The right answer stands behind the question in the
prompt, and each of its tokens is scored by what is predicted there. An answer is right
if none of them has a more probable alternative, which is to say if greedy decoding
gives it; the mean loss of its tokens tells more of a single problem.

A text is made of the books of `texts`. Between their lines stands what `task_makers`
hides; `passage` hides nothing and gives the first words of a line of the text again.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from benchmarks.language.engines import Asker, predictions
from benchmarks.language.losses import DIGITS, first_event, losses_of
from benchmarks.language.task_makers import MAKERS
from benchmarks.language.texts import BOOK_NAMES, Encode, Text

PASSAGE = "passage"
TASKS = (*MAKERS, PASSAGE)
GIVEN, ASKED = 24, 24
"""Tokens of a passage that are repeated in the question, and that have to follow."""
PIECE = 2048
"""First tokens of a book's excerpt that are used, the token before it included."""
AT_MOST = 128
"""Tokens of question and answer: no more than the shortest interval."""
SELECTION_SEED = 1
"""Of the problems by which tasks were chosen."""
SEED = 2
CHOSEN: dict[str, tuple[int, ...]] = {"passage": (2048,)}
"""Task -> lengths of text, tokens, that full KV solves."""


@dataclass(frozen=True)
class Problem:
    """A text, a question and the right answer.

    Attributes:
        id: task, length and number, such as `keys-2048-3`.
        kind: task and length.
        text_ids: tokens before the question.
        question_ids: tokens of the question.
        answer_ids: tokens that have to follow.
    """

    id: str
    kind: str
    text_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Text, question and answer."""
        return self.text_ids + self.question_ids + self.answer_ids

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the token ids."""
        return sha256(repr(self.token_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answered:
    """What was predicted where a problem's answer stands.

    Attributes:
        text_tokens: before the question.
        asked_tokens: of question and answer.
        losses: -log p of the answer's tokens, [tokens of the answer], nats.
        is_right: whether no token is more probable, [tokens of the answer].
    """

    text_tokens: int
    asked_tokens: int
    losses: np.ndarray
    is_right: np.ndarray


def problems(
    task: str, length: int, count: int, seed: int, encode: Encode, texts: Sequence[Text]
) -> list[Problem]:
    """Return the first problems of a task, always the same ones.

    Args:
        task: one of TASKS.
        length: tokens of the text, the token before all texts included.
        count: problems.
        seed: SELECTION_SEED, SEED, or another.
        encode: text -> token ids.
        texts: all of `texts.read_texts`, of at least PIECE tokens; problems are made of
            the books.

    Raises:
        ValueError: a text is shorter, or the length is more than the books have.
    """
    books = [text.token_ids[:PIECE] for text in texts if text.kind in BOOK_NAMES]
    if any(len(book) < PIECE for book in books):
        raise ValueError(
            f"text-tokens: got {min(map(len, books))}, expected at least {PIECE}"
        )
    kind = f"{task}-{length}"
    found = []
    for number in range(1, count + 1):
        rng = random.Random(f"{kind}/{seed}/{number}")
        filler = _filler(books, rng.randrange(len(books)), length)
        make = _passage if task == PASSAGE else _hidden
        parts = make(task, filler, length, rng, encode)
        problem = Problem(f"{kind}-{number}", kind, *map(tuple, parts))
        asked = len(problem.token_ids) - length
        if len(problem.text_ids) != length or asked > AT_MOST:
            raise RuntimeError(f"{problem.id}: {asked} tokens are asked")
        found.append(problem)
    return found


def _filler(books: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """Return the token before texts and so many of the books, from one of them on."""
    order = (*books[first:], *books[:first])
    words = [token for book in order for token in book[1:]]
    if len(words) < length - 1:
        raise ValueError(
            f"length: got {length}, expected at most {len(words) + 1}, what books have"
        )
    return [order[0][0], *words[: length - 1]]


def _line_starts(ids: Sequence[int], encode: Encode) -> list[int]:
    """Return the places at which a line of a text starts, the first one left out."""
    (line_end,) = encode("\n")
    return [place + 1 for place, token in enumerate(ids[:-1]) if token == line_end]


def _hidden(
    task: str, filler: list[int], length: int, rng: random.Random, encode: Encode
) -> tuple[list[int], list[int], list[int]]:
    """Return text, question and answer of a task that hides lines."""
    hidden = MAKERS[task](rng)
    line_end = encode("\n")
    lines = [[*line_end, *encode(line), *line_end, *line_end] for line in hidden.lines]
    kept = filler[: length - sum(map(len, lines))]
    starts = _line_starts(kept, encode)
    places = sorted(rng.choice(starts) for _ in lines)
    text = list(kept)
    for place, line in reversed(list(zip(places, lines, strict=True))):
        text[place:place] = line
    return text, encode(f"\n\n{hidden.begun}"), encode(hidden.answer)


def _passage(
    task: str, filler: list[int], length: int, rng: random.Random, encode: Encode
) -> tuple[list[int], list[int], list[int]]:
    """Return text, question and answer of repeating a passage of the text itself."""
    starts = _line_starts(filler[: length - GIVEN - ASKED], encode)
    place = rng.choice(starts)
    given = filler[place : place + GIVEN]
    answer = filler[place + GIVEN : place + GIVEN + ASKED]
    return filler, [*encode("\n\n"), *given], answer


def chosen(encode: Encode, texts: Sequence[Text], count: int) -> list[Problem]:
    """Return the problems of the benchmark, so many of each kind; see `problems`."""
    return [
        problem
        for task, lengths in CHOSEN.items()
        for length in lengths
        for problem in problems(task, length, count, SEED, encode, texts)
    ]


def measure(
    asker: Asker, policy: str, budget: int, items: Sequence[Problem]
) -> list[Answered]:
    """Return what was predicted for each problem's answer.

    Args:
        asker: an engine.
        policy: one of its policies, or FULL.
        budget: tokens per KV head.
        items: the problems.
    """
    prompts = [problem.token_ids for problem in items]
    found = predictions(asker, prompts, policy, budget, 1)
    return [
        _answered(problem, entries[-len(problem.answer_ids) :])
        for problem, entries in zip(items, found, strict=True)
    ]


def _answered(problem: Problem, entries: Sequence[Mapping[int, float]]) -> Answered:
    pairs = zip(entries, problem.answer_ids, strict=True)
    return Answered(
        len(problem.text_ids),
        len(problem.question_ids) + len(problem.answer_ids),
        losses_of(entries, problem.answer_ids),
        np.array([entry[token] >= max(entry.values()) for entry, token in pairs]),
    )


def figures(answered: Answered, budget: int, interval: int) -> dict[str, Any]:
    """Return what is kept of an answer.

    Args:
        answered: see `measure`.
        budget: tokens per KV head.
        interval: tokens between events.

    Returns:
        `right`: 1 if all of the answer is, else 0; `loss`: mean of its tokens, nats.

    Raises:
        ValueError: the text does not end in an event, or one comes after it.
    """
    length, asked = answered.text_tokens, answered.asked_tokens
    if length % interval or length < first_event(budget, interval):
        raise ValueError(
            f"length: got {length}, expected a multiple of the interval {interval}, at "
            f"least {first_event(budget, interval)}, the first event"
        )
    if asked > interval:
        raise ValueError(
            f"interval: got {interval}, expected at least {asked}, the tokens of "
            "question and answer"
        )
    return {
        "right": int(answered.is_right.all()),
        "loss": round(float(answered.losses.mean()), DIGITS),
    }
