"""Makes the requests of a serving comparison and computes the size of its pool."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.load import Played, Sample, run_together

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NULL_BLOCKS = 1
"""Blocks of a pool that vLLM keeps for itself."""


@dataclass(frozen=True)
class Workload:
    """A set of requests that are sent at once.

    Attributes:
        token_ids: prompts are drawn from these.
        prompt_tokens: length of each prompt.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    seed: int

    def prompts(self, round_number: int) -> list[list[int]]:
        """Return the prompts of a round, as token ids."""
        rng = random.Random(f"{self.seed}/prompts/{round_number}")
        return [rng.choices(self.token_ids, k=tokens) for tokens in self.prompt_tokens]

    async def play(self, url: str, round_number: int, sample: Sample) -> Played:
        """Send the requests of a round at once; see load.run_together."""
        prompts = self.prompts(round_number)
        return await run_together(url, prompts, self.output_tokens, sample)


def draw_lengths(requests: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Return prompt lengths in tokens, uniform from `shortest` to `longest`."""
    rng = random.Random(f"{seed}/lengths")
    return [rng.randint(shortest, longest) for _ in range(requests)]


def blocks_needed(
    prompt_tokens: Sequence[int], output_tokens: int, block_size: int
) -> int:
    """Return the blocks that stock vLLM holds when all requests are at full length.

    The last output token is never fed back, so it is not in the KV cache: a prompt of
    10 and an output of 23 tokens need 2 blocks of 16.
    """
    return sum(-(-(p + output_tokens - 1) // block_size) for p in prompt_tokens)


def pool_blocks(
    prompt_tokens: Sequence[int], output_tokens: int, block_size: int, share: float
) -> int:
    """Return the size of a pool that holds a share of all requests at full length.

    Args:
        share: usable blocks / `blocks_needed`; the product is rounded down.

    Returns:
        Blocks, vLLM's null block included.
    """
    needed = blocks_needed(prompt_tokens, output_tokens, block_size)
    return int(needed * share) + NULL_BLOCKS


def model_config(model: Path) -> dict[str, Any]:
    """Return what the `config.json` of a model's folder holds."""
    return json.loads((model / "config.json").read_text())


def block_bytes(model: Path, block_size: int, dtype: str = "float32") -> int:
    """Return the bytes of one block over all layers and KV heads.

    Args:
        model: folder with a `config.json` of the Llama or Qwen3 kind.
        dtype: of keys and values, one of VALUE_BYTES.
    """
    config = model_config(model)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    values = 2 * config["num_hidden_layers"] * kv_heads * head_dim * block_size
    return values * VALUE_BYTES[dtype]


def group_size(model: Path) -> int:
    """Return the query heads per KV head of a model; see `block_bytes`."""
    config = model_config(model)
    heads = config["num_attention_heads"]
    return heads // (config.get("num_key_value_heads") or heads)


def ordinary_token_ids(model: Path) -> tuple[int, ...]:
    """Return the ids of a model's vocabulary without special and added tokens.

    Args:
        model: folder with a `tokenizer.json`.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    return tuple(sorted(set(tokenizer.get_vocab().values()) - set(added)))
