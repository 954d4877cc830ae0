"""Reads a text on the peer: its beginning is compressed once, the rest is predicted."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from benchmarks.peer.decoding import mean_length

SEED = 0
"""Of the press that draws at random."""


@torch.inference_mode()
def read(model: Any, press: Any, token_ids: list[int], at: int) -> dict[str, Any]:
    """Return the losses of the tokens behind a compression.

    As in kvpress' pipeline, the press compresses what one forward pass has read, and
    later tokens keep their positions in the text. They are read in one pass, too.

    Args:
        model: a causal language model of transformers.
        press: context manager of kvpress, or None.
        at: tokens that are read, then compressed. The token at `at` is the first that
            is read behind that and predicts the first that is scored.

    Returns:
        `losses`: -log p, nats, of the tokens from `at + 1` on; `held`: tokens in the
        cache after the compression, mean over layers.
    """
    torch.manual_seed(SEED)
    cache, ids = DynamicCache(), torch.tensor([token_ids])
    with press(model) if press is not None else nullcontext():
        model.model(input_ids=ids[:, :at], past_key_values=cache)
    held, last = mean_length(cache), len(token_ids) - 1
    with own_masks(model, cache):
        logits = model(
            input_ids=ids[:, at:last],
            past_key_values=cache,
            position_ids=torch.arange(at, last)[None],
        ).logits[0]
    found = cross_entropy(logits.float(), ids[0, at + 1 :], reduction="none")
    return {"losses": found.tolist(), "held": round(held, 2)}


@contextmanager
def own_masks(model: Any, cache: Any) -> Iterator[None]:
    """Let each layer see all that it holds, and new tokens up to the query.

    transformers makes one mask, as long as the first layer; under PyramidKV others are
    shorter.
    """

    def mask(module: Any, inputs: Any, kwargs: dict[str, Any]) -> Any:
        held = cache.layers[module.layer_idx].keys.shape[2]
        new = kwargs["hidden_states"].shape[1]
        seen = torch.ones(new, held + new, dtype=torch.bool).tril(held)
        return inputs, kwargs | {"attention_mask": seen[None, None]}

    hooks = [
        layer.self_attn.register_forward_pre_hook(mask, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
