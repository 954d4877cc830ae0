"""Makes training rows from problems of this repository's reasoner, with traces."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from vllm_kvpolicy.train.rows import Row

MAX_MISSES = 2000  # give up after this many unsuitable problems in a row
VALIDATION_SEED = 1 << 42  # draws held-out problems, training seeds the others


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
        return _rows(self.largest, self.length, seed, held=False)


def read_reasoner(
    model: Path, tokenizer: Any, length: int, num_validation: int
) -> ReasonerRows:
    """Read which problems a reasoner knows, and draw rows for validation.

    Args:
        model: its checkpoint folder.
        tokenizer: the model's own, from transformers.
        length: most tokens of a row; longer ones are skipped.
        num_validation: rows for validation.

    Raises:
        ValueError: no package `reasoner`, a model that it did not train, or no problem
            that is short enough.
    """
    try:
        from reasoner.tokenizer import vocabulary
    except ImportError:
        raise ValueError(
            "reasoner: the package is missing; run in a checkout of the repository"
        ) from None
    try:
        largest = json.loads((model / "training.json").read_text())["lines"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(
            f"reasoner: {str(model)!r} is not a reasoner checkpoint: {error!r}"
        ) from None
    if tokenizer.get_vocab() != dict(vocabulary()):
        raise ValueError(f"reasoner: {str(model)!r} has a different vocabulary")
    held = _rows(largest, length, VALIDATION_SEED, held=True)
    return ReasonerRows(largest, length, list(islice(held, num_validation)))


def _rows(
    largest: Mapping[str, int], length: int, seed: int, held: bool
) -> Iterator[Row]:
    """Yield rows of held-out problems, or of those that are not."""
    from reasoner.problems import TRAINED_TEMPLATES, generate, held_out
    from reasoner.tokenizer import EOS, chat_prompt, encode

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
