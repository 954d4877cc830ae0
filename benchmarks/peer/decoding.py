"""Decodes greedily on the peer: one prompt in, token ids and times out."""

import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache


@torch.inference_mode()
def answer(
    model: Any, press: Any, prompt: list[int], start: int, max_tokens: int
) -> dict[str, Any]:
    """Return the greedy answer to a prompt.

    Args:
        model: a causal language model of transformers.
        press: context manager of kvpress, or None.
        start: tokens of the prompt before the user's words, at least 1.
        max_tokens: most tokens of the answer, its end included.

    Returns:
        `tokens`: ids of the answer, its end included; `stopped`: whether the model
        ended it; `seconds`: from the prompt to the last token; `kv_read`: tokens that
        a head reads in decoding, summed over steps; `kv_peak`: most tokens that the
        cache held at once; both means over layers.
    """
    began = time.perf_counter()
    cache, ids = DynamicCache(), torch.tensor([prompt])
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    model.model(input_ids=ids[:, :start], past_key_values=cache)
    with press(model) if press is not None else nullcontext():
        logits = model(
            input_ids=ids[:, start:],
            past_key_values=cache,
            position_ids=torch.arange(start, len(prompt))[None],
            logits_to_keep=1,
        ).logits
        read, peak = 0.0, float(len(prompt))
        tokens = [int(logits[0, -1].argmax())]
        while tokens[-1] not in ends and len(tokens) < max_tokens:
            held = mean_length(cache) + 1
            read, peak = read + held, max(peak, held)
            logits = model(
                input_ids=torch.tensor([tokens[-1:]]),
                past_key_values=cache,
                position_ids=torch.tensor([[len(prompt) + len(tokens) - 1]]),
            ).logits
            tokens.append(int(logits[0, -1].argmax()))
    return {
        "tokens": tokens,
        "stopped": tokens[-1] in ends,
        "seconds": round(time.perf_counter() - began, 4),
        "kv_read": round(read),
        "kv_peak": round(peak),
    }


def mean_length(cache: Any) -> float:
    """Return the number of tokens in a cache, mean over layers."""
    return sum(layer.keys.shape[2] for layer in cache.layers) / len(cache.layers)
