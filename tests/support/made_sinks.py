"""Writes random gpt-oss models: sliding windows and learned sinks in every layer."""

from pathlib import Path

from support.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tokenizer
from vllm_kvpolicy.commands import trials

NUM_FULL = 2


def make_gpt_oss(path: Path | str) -> Path:
    """Write the model of `verify --feature sinks` with a tokenizer."""
    trials.make_gpt_oss(path)
    write_tokenizer(Path(path), [*SPECIAL_TOKENS, *CHARACTERS], 4096)
    return Path(path)
