"""Turns options that both trainers share into rows and a dtype."""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

from vllm_kvpolicy.train.reasoner_rows import ReasonerRows, read_reasoner
from vllm_kvpolicy.train.rows import Rows, read_rows


def rows_of(given: argparse.Namespace) -> Rows | ReasonerRows:
    """Return the rows of the options; see `options.add_rows`.

    Raises:
        ValueError: there are none, or too few.
    """
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    if given.reasoner:
        model = Path(given.model)
        return read_reasoner(model, tokenizer, given.length, given.validation_rows)
    return read_rows(
        given.text, tokenizer, given.length, given.instruction, given.validation_rows
    )


def words_of(given: argparse.Namespace) -> str:
    """Return a description of the rows that distinguishes runs."""
    source = f"{given.text} {given.instruction!r}" if given.text else "reasoner"
    return f"{given.model}, {source}, length {given.length}"


def dtype_of(given: argparse.Namespace) -> torch.dtype:
    """Return the dtype of computation."""
    on_gpu = torch.device(given.device).type != "cpu"
    return getattr(torch, given.dtype or ("bfloat16" if on_gpu else "float32"))
