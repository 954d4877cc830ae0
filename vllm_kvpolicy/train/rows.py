"""Makes training rows from text files."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Rows:
    """Rows for training and for validation, [T] int64 token ids each.

    Args:
        training: at least one.
        validation: at least one.
    """

    training: Sequence[torch.Tensor]
    validation: Sequence[torch.Tensor]

    def shuffled(self, seed: int) -> Iterator[torch.Tensor]:
        """Yield training rows endlessly, all of them in each round."""
        order = list(range(len(self.training)))
        generator = random.Random(seed)
        while True:
            generator.shuffle(order)
            for index in order:
                yield self.training[index]


def read_rows(
    path: Path, tokenizer: Any, length: int, instruction: str, num_validation: int
) -> Rows:
    """Make rows from a text file; the last ones are for validation.

    Each line of a `.jsonl` file is an object with `text`. A text of at least `length`
    tokens makes one row of its first `length` tokens; shorter ones are skipped. Any
    other file is one text, cut into rows.

    Args:
        path: the file, UTF-8.
        tokenizer: from transformers.
        length: tokens of text per row.
        instruction: the user's message is this, then the text; "" for text alone.
        num_validation: rows for validation.

    Raises:
        ValueError: a file that cannot be read or has too few rows, or a tokenizer
            without the chat template that an instruction needs.
    """
    if instruction and not tokenizer.chat_template:
        raise ValueError(
            "instruction: the tokenizer has no chat template; pass --instruction ''"
        )
    rows = []
    for text in _texts(path):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        last = length if path.suffix == ".jsonl" else len(ids)
        for start in range(0, last - length + 1, length):
            part = ids[start : start + length]
            if len(part) == length:
                rows.append(_wrapped(part, tokenizer, instruction))
    if len(rows) <= num_validation:
        raise ValueError(
            f"text: {str(path)!r} gives {len(rows)} rows of {length} tokens, "
            f"expected more than the {num_validation} for validation; give more text, "
            "or a smaller --length or --validation-rows"
        )
    return Rows(rows[:-num_validation], rows[-num_validation:])


def _texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text: cannot read {str(path)!r}: {error}") from None
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ValueError(
                f"text: {str(path)!r} line {number}: expected a JSON object with a "
                "'text' string"
            )
        yield text


def _wrapped(ids: list[int], tokenizer: Any, instruction: str) -> torch.Tensor:
    """Return the ids of a text, or of the chat that begins with it."""
    if instruction:
        content = f"{instruction}\n\n{tokenizer.decode(ids)}"
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            return_dict=False,
        )
    return torch.tensor(ids)
