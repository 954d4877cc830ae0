"""Makes training rows: of texts, of conversations, and of the reasoner's problems.

Source: a chat template's own generation tags, as transformers reads them. Deviations:
for templates without such tags, prefixes of the conversation are rendered and compared.
"""

import json
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from reasoner.problems import TRAINED_TEMPLATES, generate, held_out
from reasoner.tokenizer import EOS, chat_prompt, encode, vocabulary

logger = logging.getLogger(__name__)

Message = dict[str, Any]
"""One turn: `role`, `content`, and what else the template reads."""

TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # around answers, in a template
MAX_MISSES = 2000  # give up after this many unsuitable problems in a row
VALIDATION_SEED = 1 << 42  # draws held-out problems, training seeds the others


def is_chat(messages: Any) -> bool:
    """Return whether it is a list of messages with a role and a content, not empty."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(item, dict)
            and isinstance(item.get("role"), str)
            and isinstance(item.get("content"), str)
            for item in messages
        )
    )


def render(messages: Sequence[Message], tokenizer: Any, prompt: bool) -> torch.Tensor:
    """Return the ids [T] int64 of a conversation.

    Args:
        prompt: end with the start of an answer.

    Raises:
        ValueError: the template refuses the conversation.
    """
    return torch.tensor(_applied(messages, tokenizer, prompt)["input_ids"])


def answers(messages: Sequence[Message], tokenizer: Any) -> torch.Tensor:
    """Return which tokens of `render(messages, tokenizer, False)` are the assistant's.

    An answer ends with its turn: the tokens that close it are the assistant's too.

    Returns:
        [T] bool.

    Raises:
        ValueError: the template refuses the conversation, or it has no generation tags
            and renders a turn differently when later ones follow, or without the
            start of answers that it gives as a prompt.
    """
    if TAG.search(tokenizer.get_chat_template()):
        found = _applied(messages, tokenizer, False, return_assistant_tokens_mask=True)
        return torch.tensor(found["assistant_masks"], dtype=torch.bool)
    whole = render(messages, tokenizer, prompt=False)
    mask = torch.zeros(len(whole), dtype=torch.bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], tokenizer, prompt=True)
        after = render(messages[: index + 1], tokenizer, prompt=False)
        if not (_starts(whole, after) and _starts(after, before)):
            raise ValueError(
                f"message {index + 1}: what the chat template renders up to it is no "
                "beginning of the whole, so its tokens are unknown; expected a "
                "template with generation tags"
            )
        mask[len(before) : len(after)] = True
    return mask


def _starts(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Return whether ids begin with other ids."""
    return torch.equal(whole[: len(part)], part)


def _applied(
    messages: Sequence[Message], tokenizer: Any, prompt: bool, **how: Any
) -> Any:
    """Apply the chat template and return what transformers returns, by name."""
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=prompt, return_dict=True, **how
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the chat template refuses the conversation: {error}"
        ) from None


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
    """Rows for training and for validation."""

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
        length: tokens of text per row, and most tokens of a conversation.
        shortest: tokens that a line's text has at least; None for `length`.
        instruction: the user's message is this, then the text; "" for text alone.
        answers_only: the loss counts only in what the assistant says.
    """

    tokenizer: Any
    length: int
    instruction: str
    answers_only: bool = False
    shortest: int | None = None

    def of_text(self, text: str, only_first: bool = False) -> list[Row]:
        """Cut a text into rows; what is left at its end is skipped.

        Args:
            only_first: the first row alone, which may be shorter, see `shortest`.

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
        if only_first:
            least = self.length if self.shortest is None else self.shortest
            return [self._wrapped(ids[: self.length])] if len(ids) >= least else []
        starts = range(0, len(ids) - self.length + 1, self.length)
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

    Each line of a `.jsonl` file is an object with `text` or `messages`. A text makes
    one row of its first `length` tokens; those below `shortest` are skipped. Messages
    make one row of at most `length` tokens; it is skipped where the loss counts nowhere
    in it. Any other file is one text, cut into rows.

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
            return maker.of_text(found["text"], only_first=True)
    raise ValueError(
        "expected a JSON object with a 'text' string, or with 'messages', a list of "
        "objects with the strings 'role' and 'content'"
    )


@dataclass(frozen=True)
class ReasonerRows:
    """Rows with prompt and trace, of all families and sizes that a model knows.

    Args:
        largest: the largest size of each family, in lines.
        length: most tokens of a row; longer ones are skipped.
        validation: of held-out problems.
    """

    largest: Mapping[str, int]
    length: int
    validation: list[Row]

    def shuffled(self, seed: int) -> Iterator[Row]:
        """Yield rows endlessly."""
        return _problem_rows(self.largest, self.length, seed, held=False)


def read_reasoner(
    model: Path, tokenizer: Any, length: int, num_validation: int
) -> ReasonerRows:
    """Read which problems a reasoner knows, and draw rows for validation.

    Raises:
        ValueError: a model that the reasoner's trainer did not make, or no problem that
            is short enough.
    """
    try:
        largest = json.loads((model / "training.json").read_text())["lines"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(
            f"reasoner: {str(model)!r} is not a reasoner checkpoint: {error!r}"
        ) from None
    if tokenizer.get_vocab() != dict(vocabulary()):
        raise ValueError(f"reasoner: {str(model)!r} has a different vocabulary")
    held = _problem_rows(largest, length, VALIDATION_SEED, held=True)
    return ReasonerRows(largest, length, list(islice(held, num_validation)))


def _problem_rows(
    largest: Mapping[str, int], length: int, seed: int, held: bool
) -> Iterator[Row]:
    """Yield rows of held-out problems, or of those that are not."""
    misses = 0
    for index in count():
        drawn = random.Random(f"{seed}/{index}")
        family = drawn.choice(sorted(largest))
        lines = drawn.randint(max(3, largest[family] // 4), largest[family])
        template = drawn.choice(TRAINED_TEMPLATES)
        problem = generate(family, lines, drawn.getrandbits(40), template)
        row = encode(chat_prompt(problem.prompt) + problem.completion + EOS)
        if held_out(problem) == held and len(row) <= length:
            misses = 0
            yield Row(torch.tensor(row))
        elif (misses := misses + 1) == MAX_MISSES:
            raise ValueError(
                f"length: got {length}, expected more: none of {misses} problems fits"
            )
