"""Reads a text on the peer: its beginning is compressed once, the rest is predicted."""

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from benchmarks.peer.decoding import mean_length

SEED = 0
"""Of the press that draws at random."""


@torch.inference_mode()
def read(
    model: Any, press: Any, token_ids: list[int], at: int, step: int
) -> dict[str, Any]:
    """Return the losses of the tokens behind a compression.

    The token at `at` is the first that is read behind it and predicts the first that is
    scored. As in kvpress' pipeline, the press compresses what one forward pass has
    read, and later tokens keep their positions in the text.

    Args:
        model: a causal language model of transformers.
        press: context manager of kvpress, or None.
        token_ids: of the text.
        at: tokens that are read, then compressed.
        step: tokens of each later forward pass. Only 1 is right where layers or heads
            hold different numbers of tokens: transformers has one mask for all layers,
            and kvpress hides masked keys from the queries of one pass.

    Returns:
        `losses`: -log p, nats, of the tokens from `at + 1` on; `held`: tokens in the
        cache after the compression, mean over layers.
    """
    torch.manual_seed(SEED)
    cache, ids = DynamicCache(), torch.tensor([token_ids])
    with press(model) if press is not None else nullcontext():
        model.model(input_ids=ids[:, :at], past_key_values=cache)
    held = mean_length(cache)
    found, last = [], len(token_ids) - 1
    for start in range(at, last, step):
        end = min(start + step, last)
        logits = model(
            input_ids=ids[:, start:end],
            past_key_values=cache,
            position_ids=torch.arange(start, end)[None],
        ).logits[0]
        targets = ids[0, start + 1 : end + 1]
        found.append(cross_entropy(logits.float(), targets, reduction="none"))
    return {"losses": torch.cat(found).tolist(), "held": round(held, 2)}
