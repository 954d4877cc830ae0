"""Makes the questions of each task."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from benchmarks.accuracy import datasets, ruler
from benchmarks.accuracy.datasets import Row
from reasoner.problems import FAMILIES, generate, held_out
from reasoner.tokenizer import encode

EXACT, MATH, ALL_IN_TEXT, ANY_IN_TEXT = "exact", "math", "all_in_text", "any_in_text"
BOX_PLEASE = "\n\nReason step by step and put the final answer within \\boxed{}."


@dataclass(frozen=True)
class Question:
    """One problem with its prompt and its right answers.

    Attributes:
        answers: right answers; `EXACT` and `MATH` have one.
        judged: how it is scored; one of the constants of this module.
        expected_tokens: rough length of the answer, for estimates of time.
    """

    task: str
    id: str
    prompt: str
    answers: tuple[str, ...]
    judged: str
    expected_tokens: int
    max_tokens: int

    @property
    def digest(self) -> str:
        """Return what tells this question from others; see `digest_of`."""
        return digest_of(self.prompt, self.answers)


def digest_of(prompt: str, answers: Sequence[str]) -> str:
    """Return eight characters that depend on the prompt and the right answers."""
    text = "\0".join([prompt, *answers])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_task(task: str) -> str:
    """Return the name of a task if it exists.

    Raises:
        ValueError: it does not exist.
    """
    name, colon, size = task.partition(":")
    sized = name in FAMILIES or name in ruler.GENERATORS
    if (sized and size.isdigit()) or (not colon and datasets.is_known(name)):
        return task
    raise ValueError(
        f"task: expected NAME:SIZE with a name of {sorted(FAMILIES)} or "
        f"{sorted(ruler.GENERATORS)}, or one of {datasets.names()}, got {task!r}"
    )


def questions_of(task: str, n: int, seed: int, data: Path) -> list[Question]:
    """Return the questions of a task, always the same ones.

    Args:
        n: most questions; a file may have fewer.
        seed: first generated problem; of a file the first `n` rows are used.

    Raises:
        ValueError: no such task or file, or a row of another format.
    """
    name, _, size = check_task(task).partition(":")
    if name in FAMILIES:
        return list(islice(_worked(task, name, int(size), seed), n))
    if name in ruler.GENERATORS:
        return [_searched(task, name, int(size), s) for s in range(seed, seed + n)]
    return [_from_file(name, row) for row in datasets.read(name, data)[:n]]


def _worked(task: str, family: str, lines: int, seed: int) -> Iterator[Question]:
    """Yield problems of the packaged model that its training skipped.

    An answer may take a quarter more tokens than the worked one.
    """
    for number in count(seed):
        problem = generate(family, lines, number)
        if held_out(problem):
            tokens = len(encode(problem.completion))
            yield Question(
                task=task,
                id=str(number),
                prompt=problem.prompt,
                answers=(problem.answer,),
                judged=EXACT,
                expected_tokens=tokens,
                max_tokens=tokens * 5 // 4 + 32,
            )


def _searched(task: str, name: str, words: int, seed: int) -> Question:
    """Return a generated long prompt."""
    prompt, answers = ruler.GENERATORS[name](words, seed)
    return Question(
        task, str(seed), prompt, answers, ALL_IN_TEXT, ruler.TOKENS, ruler.MAX_TOKENS
    )


def _from_file(task: str, row: Row) -> Question:
    """Return a row of a local file."""
    form = datasets.format_of(task)
    return Question(
        task=task,
        id=row.id,
        prompt=row.prompt + BOX_PLEASE if form.is_math else row.prompt,
        answers=row.answers,
        judged=MATH if form.is_math else ANY_IN_TEXT,
        expected_tokens=form.max_tokens // 2,
        max_tokens=form.max_tokens,
    )
