"""Owns the batches of the training script: problems as token and position ids."""

import random

import torch

from reasoner.problems import TRAINED_TEMPLATES, generate, held_out
from reasoner.tokenizer import ASSISTANT, EOS, chat_prompt, encode, vocabulary

FIRST_TEMPLATE_SHARE = 0.5
"""Share of problems in template 0; the rest is spread over all trained ones."""


def make_batch(
    family: str, lines: int, budget_tokens: int, first_seed: int
) -> tuple[torch.Tensor, int]:
    """Generates one batch of problems as long as the first, none of them held out.

    Args:
        budget_tokens: upper bound on rows * length, at least one row.
        first_seed: seed of the first row, the others follow.

    Returns:
        Token ids [B, T] int64, and the number of prompt tokens per row.
    """
    rows: list[list[int]] = []
    prompt_tokens, seed = 0, first_seed
    while not rows or (len(rows) + 1) * len(rows[0]) <= budget_tokens:
        rng = random.Random(seed)
        first = rng.random() < FIRST_TEMPLATE_SHARE
        template = 0 if first else rng.choice(TRAINED_TEMPLATES)
        problem = generate(family, lines, seed, template)
        seed += 1
        if held_out(problem):
            continue
        prompt = encode(chat_prompt(problem.prompt))
        row = prompt + encode(problem.completion + EOS)
        if not rows or len(row) == len(rows[0]):
            prompt_tokens = len(prompt)
            rows.append(row)
    return torch.tensor(rows), prompt_tokens


def spread_positions(ids: torch.Tensor, seed: int, max_position: int) -> torch.Tensor:
    """Draws position ids with a few gaps between lines of the trace.

    Short problems then show the model the distances of long ones. Three rows in five
    have no gap; in the others, a gap follows the prompt and about three lines, up to
    ``max_position`` in all. The prompt has none: where the next line is, the model
    learns from the tokens just before it.

    Args:
        ids: [B, T] int64 token ids, on the CPU.
        max_position: largest position id, where T does not reach further itself.

    Returns:
        [B, T] int64 position ids, ascending in each row from 0.
    """
    draw = torch.Generator().manual_seed(seed)
    rows, tokens = ids.shape
    vocab = vocabulary()
    prompt_end = ids == vocab[ASSISTANT]
    ends = ((ids == vocab[";"]) | (ids == vocab["?"])) & prompt_end.cumsum(1).bool()
    chosen = torch.rand(rows, tokens, generator=draw) * ends.sum(1, True) < 3
    shares = torch.rand(rows, tokens, generator=draw) * (ends & chosen | prompt_end)
    shares /= shares.sum(1, True).clamp_min(1e-6)
    total = torch.rand(rows, 1, generator=draw) * max(0, max_position - tokens)
    total *= torch.rand(rows, 1, generator=draw) < 0.4
    gaps = (shares * total).long().roll(1, 1)
    return torch.arange(tokens) + gaps.cumsum(1)
