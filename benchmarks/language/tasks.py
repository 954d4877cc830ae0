"""Retrieval and few-shot tasks in long texts, asked behind the last event.

The text of a problem ends at a multiple of every interval, where an event is, and the
questions follow: what is dropped is chosen before a question is seen, and nothing is
dropped among questions and answers. A problem asks several questions, each followed by
its right answer, all in one prompt; a token of an answer is scored by what is predicted
there. An answer is right if no token of it has a more probable alternative, which is to
say if greedy decoding gives it there; the mean loss of its tokens tells more.

CHOSEN has tasks that full KV solves: at least 80 % of 20 or more answers to problems of
SELECTION_SEED are right, and at most 10 % of them without the text. This was found
before any policy ran; `choose` does it again. Right answers and their mean loss (nats)
at 2,048 tokens, and the same without the text of problems:

    keys     20 of 21  0.07    0 of 28  2.33
    lookup   21 of 21  0.02    1 of 28  2.22
    mapping  21 of 21  0.14    0 of 28  7.43
    facts    16 of 21  0.87    0 of 28  6.00  not chosen
    labels    4 of 6   0.78    0 of 12  9.70  not chosen, undecided
    lists     3 of 6   0.36    0 of 12  4.17  not chosen, undecided
    passage   1 of 3   0.39    0 of 12  3.72  not chosen, undecided

    chains    0 of 42  1.24    0 of 42  6.03  not chosen
    variables 5 of 42  0.75    0 of 42  2.33  not chosen
    hops      7 of 49  1.69    0 of 49  8.02  not chosen
    votes     9 of 42  3.68    1 of 42  9.02  not chosen

Those between `mapping` and `votes` asked where people live, for labels of words, for
the rest of a list, for how a line goes on, and, as RULER does (Hsieh et al., 2024), for
all words of a chain of pairs, for the value of a variable that was copied twice, and
for where the owner of a thing lives; this table is all that is left of them.

At 4,096 tokens:

    keys     38 of 49  0.13    0 of 49  2.37  not chosen
    lookup   48 of 49  0.05    0 of 49  2.22
    mapping  47 of 49  0.16    0 of 49  7.22

Qwen2.5-Coder 1.5B, of which fewer problems were asked, solves `votes`, and no other of
those that SmolLM2 does not, at 2,048 tokens:

    chains    4 of 12  0.67    0 of 12  5.70  not chosen
    variables 4 of 12  0.54    0 of 12  2.12  not chosen
    hops      4 of 14  1.05    0 of 14  8.74  not chosen
    votes    12 of 14  0.72    0 of 14  9.00  `--kinds votes-2048`

Lines stand three times in a text because fewer answers were right when those of keys,
lookup and facts stood once: 14 of 21.

A text is made of the books of `texts`. Between their lines stands what `task_makers`
hides.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from typing import Any

import numpy as np

from benchmarks.language.engines import Asker, Predicted, predictions
from benchmarks.language.losses import DIGITS, first_event, losses_of
from benchmarks.language.task_makers import MAKERS
from benchmarks.language.texts import BOOK_NAMES, Encode, Text

PIECE = 2048
"""First tokens of a book's excerpt that are used, the token before it included."""
AT_MOST = 128
"""Tokens of questions and answers: no more than the shortest interval."""
LENGTHS = (2048, 4096)
"""Tokens of a text."""
SELECTION_SEED = 1
"""Of the problems by which tasks were chosen."""
SEED = 2
CHOSEN: dict[str, tuple[int, ...]] = {
    "keys": (2048,),
    "lookup": (2048, 4096),
    "mapping": (2048, 4096),
}
"""Task -> lengths of text, tokens, that full KV solves."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A text, questions and the right answers.

    Attributes:
        id: task, length and number, such as `keys-2048-3`.
        kind: task and length.
        text_ids: tokens before the questions.
        asked: tokens of a question and of the answer that has to follow, in order.
    """

    id: str
    kind: str
    text_ids: Ids
    asked: tuple[tuple[Ids, Ids], ...]

    @property
    def asked_tokens(self) -> int:
        """Tokens of questions and answers."""
        return sum(len(one) + len(two) for one, two in self.asked)

    @property
    def token_ids(self) -> Ids:
        """Text, and each question with its answer."""
        return sum((one + two for one, two in self.asked), self.text_ids)

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the token ids."""
        return sha256(repr(self.token_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answered:
    """What was predicted where a problem's answers stand.

    Attributes:
        losses: mean -log p of the tokens of each answer, [questions], nats.
        is_right: whether no token of it has a more probable one, [questions].
        held: KV tokens that questions and answers read, beside full KV's.
    """

    text_tokens: int
    asked_tokens: int
    losses: np.ndarray
    is_right: np.ndarray
    held: float = 1.0


def problems(
    task: str, length: int, count: int, seed: int, encode: Encode, texts: Sequence[Text]
) -> list[Problem]:
    """Return the first problems of a task, always the same ones.

    Args:
        length: tokens of the text, the token before all texts included.
        seed: SELECTION_SEED, SEED, or another.
        texts: all of `texts.read_texts`, of at least PIECE tokens; problems are made of
            the books, as far as the tokenizer has lines of them end in a token of their
            own.

    Raises:
        ValueError: a text is shorter, or the length is more than the books have.
    """
    (line_end,) = encode("\n")
    books = [
        text.token_ids[:PIECE]
        for text in texts
        if text.kind in BOOK_NAMES and line_end in text.token_ids[:PIECE]
    ]
    if any(len(book) < PIECE for book in books):
        raise ValueError(
            f"text-tokens: got {min(map(len, books))}, expected at least {PIECE}"
        )
    kind = f"{task}-{length}"
    found = []
    for number in range(1, count + 1):
        rng = random.Random(f"{kind}/{seed}/{number}")
        text = _filler(books, rng.randrange(len(books)), length)
        hidden = MAKERS[task](rng)
        _hide(hidden.lines, text, rng, encode)
        pairs = tuple(
            (tuple(encode(f"\n\n{question}")), tuple(encode(answer)))
            for question, answer in hidden.asked
        )
        problem = Problem(f"{kind}-{number}", kind, tuple(text), pairs)
        if len(text) != length or problem.asked_tokens > AT_MOST:
            raise RuntimeError(
                f"{problem.id}: {len(text)} and {problem.asked_tokens} tokens"
            )
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


def _hide(
    hidden: Sequence[str], text: list[int], rng: random.Random, encode: Encode
) -> None:
    """Put lines between those of a text, the end of which makes room for them."""
    line_end = encode("\n")
    lines = [[*line_end, *encode(line), *line_end, *line_end] for line in hidden]
    del text[len(text) - sum(map(len, lines)) :]
    starts = [place + 1 for place, token in enumerate(text[:-1]) if [token] == line_end]
    places = sorted(rng.choice(starts) for _ in lines)
    for place, line in reversed(list(zip(places, lines, strict=True))):
        text[place:place] = line


def chosen(
    encode: Encode, texts: Sequence[Text], count: int, kinds: Collection[str] = ()
) -> list[Problem]:
    """Return the problems of the benchmark, so many of each kind; see `problems`.

    Args:
        kinds: of these kinds, such as `votes-2048`, even those that are not chosen; by
            default of all that are.
    """
    asked = [
        (task, length)
        for task, length in product(MAKERS, LENGTHS)
        if f"{task}-{length}" in kinds
    ]
    asked = asked or [(task, each) for task, some in CHOSEN.items() for each in some]
    return [
        problem
        for task, length in asked
        for problem in problems(task, length, count, SEED, encode, texts)
    ]


def measure(
    asker: Asker, policy: str, budget: int, items: Sequence[Problem]
) -> list[Answered]:
    """Return what was predicted for each problem's answers."""
    prompts = [problem.token_ids for problem in items]
    found = predictions(asker, prompts, policy, budget, 1)
    return [_answered(problem, one) for problem, one in zip(items, found, strict=True)]


def _answered(problem: Problem, predicted: Predicted) -> Answered:
    """Return how answers were predicted."""
    entries = predicted.entries
    end = len(problem.text_ids) - 1
    losses, is_right = [], []
    for question, answer in problem.asked:
        start = end + len(question)
        end = start + len(answer)
        own = losses_of(entries[start:end], answer)
        best = np.array([max(entry.values()) for entry in entries[start:end]])
        losses.append(own.mean())
        is_right.append((-own >= best).all())
    return Answered(
        len(problem.text_ids),
        problem.asked_tokens,
        np.array(losses),
        np.array(is_right),
        predicted.held_share(len(problem.text_ids)),
    )


def figures(answered: Answered, budget: int, interval: int) -> dict[str, Any]:
    """Return what is kept of the answers.

    Returns:
        `right`: share of the answers; `loss`: their mean, nats; `held`.

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
            "questions and answers"
        )
    return {
        "right": round(float(answered.is_right.mean()), DIGITS),
        "loss": round(float(answered.losses.mean()), DIGITS),
        "held": round(answered.held, DIGITS),
    }
