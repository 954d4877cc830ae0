"""Makes training rows from text files."""

import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_kvpolicy.train.chats import Message, answers, is_chat, render

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One sequence of tokens.

    Args:
        ids: [T] int64 token ids.
        counts: [T] bool, whether the loss counts what is predicted after a token; None
            if it counts everywhere.
    """

    ids: torch.Tensor
    counts: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return T."""
        return len(self.ids)

    @property
    def weight(self) -> int:
        """Return the number of tokens where the loss counts."""
        return len(self) if self.counts is None else int(self.counts.sum())


@dataclass(frozen=True)
class Rows:
    """Rows for training and for validation.

    Args:
        training: at least one.
        validation: at least one.
    """

    training: Sequence[Row]
    validation: Sequence[Row]

    def shuffled(self, seed: int) -> Iterator[Row]:
        """Yield training rows endlessly, all of them in each round."""
        order = list(range(len(self.training)))
        generator = random.Random(seed)
        while True:
            generator.shuffle(order)
            for index in order:
                yield self.training[index]


@dataclass(frozen=True)
class Maker:
    """How rows are made.

    Args:
        tokenizer: from transformers.
        length: tokens of text per row, and most tokens of a conversation.
        instruction: the user's message is this, then the text; "" for text alone.
        answers_only: the loss counts only in what the assistant says.
    """

    tokenizer: Any
    length: int
    instruction: str
    answers_only: bool = False

    def of_text(self, text: str, most: int | None = None) -> list[Row]:
        """Cut a text into rows, at most `most`; what is left at its end is skipped.

        Raises:
            ValueError: an instruction without a chat template, or no answers to count.
        """
        if self.answers_only:
            raise ValueError("loss_on: got 'answers' with a text, expected 'messages'")
        if self.instruction and not self.tokenizer.chat_template:
            raise ValueError(
                "instruction: the tokenizer has no chat template; pass --instruction ''"
            )
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        starts = range(0, len(ids) - self.length + 1, self.length)[:most]
        return [self._wrapped(ids[start : start + self.length]) for start in starts]

    def of_chat(self, messages: Sequence[Message]) -> Row:
        """Return the row of a conversation, cut after `length` tokens.

        Raises:
            ValueError: the chat template is missing or does not fit.
        """
        if not self.tokenizer.chat_template:
            raise ValueError("messages: the tokenizer has no chat template")
        ids = render(messages, self.tokenizer, prompt=False)[: self.length]
        if not self.answers_only:
            return Row(ids)
        # A token is predicted after the one before it.
        said = answers(messages, self.tokenizer)[: self.length]
        return Row(ids, torch.cat([said[1:], said.new_zeros(1)]))

    def _wrapped(self, ids: list[int]) -> Row:
        """Return the row of a text, or of the chat that begins with it."""
        if not self.instruction:
            return Row(torch.tensor(ids))
        content = f"{self.instruction}\n\n{self.tokenizer.decode(ids)}"
        asked = [{"role": "user", "content": content}]
        return Row(render(asked, self.tokenizer, prompt=True))


def read_rows(path: Path, maker: Maker, num_validation: int) -> Rows:
    """Make rows from a text file; the last ones are for validation.

    Each line of a `.jsonl` file is an object with `text` or `messages`. A text of at
    least `length` tokens makes one row of its first `length` tokens; shorter ones are
    skipped. Messages make one row of at most `length` tokens; it is skipped where the
    loss counts nowhere in it. Any other file is one text, cut into rows.

    Args:
        path: the file, UTF-8.
        maker: makes rows.
        num_validation: rows for validation.

    Raises:
        ValueError: a file that cannot be read or has too few rows, or a row that cannot
            be made; the error names its line.
    """
    made = list(_rows(path, maker))
    rows = [row for row in made if row.weight]
    skipped = ""
    if len(rows) < len(made):
        skipped = f" and skips {len(made) - len(rows)} without an answer"
        logger.warning("text: %r gives %d rows%s", str(path), len(rows), skipped)
    if len(rows) <= num_validation:
        raise ValueError(
            f"text: {str(path)!r} gives {len(rows)} rows{skipped} at --length "
            f"{maker.length}, expected more than the {num_validation} for validation; "
            "give more text, or a smaller --length or --validation-rows"
        )
    return Rows(rows[:-num_validation], rows[-num_validation:])


def _rows(path: Path, maker: Maker) -> Iterator[Row]:
    """Yield the rows of a file."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text: cannot read {str(path)!r}: {error}") from None
    if path.suffix != ".jsonl":
        yield from maker.of_text(content)
        return
    for number, line in enumerate(content.removesuffix("\n").split("\n"), 1):
        try:
            yield from _line_rows(line, maker)
        except ValueError as error:
            raise ValueError(f"text: {str(path)!r} line {number}: {error}") from None


def _line_rows(line: str, maker: Maker) -> list[Row]:
    """Return the rows of one line of a `.jsonl` file: one or none."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    if isinstance(found, dict):
        if is_chat(found.get("messages")):
            return [maker.of_chat(found["messages"])]
        if isinstance(found.get("text"), str):
            return maker.of_text(found["text"], most=1)
    raise ValueError(
        "expected a JSON object with a 'text' string, or with 'messages', a list of "
        "objects with the strings 'role' and 'content'"
    )
