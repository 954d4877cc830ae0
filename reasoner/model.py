"""Owns the model's shape and how a checkpoint directory is written.

The model is a ``Qwen3ForCausalLM``, so transformers and vLLM load it natively.
"""

import json
import os
import shutil
from itertools import count
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from reasoner.presets import PRESETS
from reasoner.problems import generate, held_out
from reasoner.tokenizer import BOS, EOS, PAD, save_tokenizer, vocabulary

CONTEXT_TOKENS = 8192
"""Longest context the configuration allows, in tokens; training stays below it."""
EXAMPLE = ("copy", 60)
"""Family and lines of the problem that a checkpoint comes with, for a first try."""


def model_config(preset: str) -> Qwen3Config:
    """Returns the configuration of a preset, with the dtype that it is stored in."""
    shape, vocab = PRESETS[preset], vocabulary()
    return Qwen3Config(
        vocab_size=-(-len(vocab) // 32) * 32,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=vocab[BOS],
        eos_token_id=vocab[EOS],
        pad_token_id=vocab[PAD],
        use_cache=True,
        dtype=shape.stored,
    )


def new_model(preset: str, seed: int) -> Qwen3ForCausalLM:
    """Returns a model with random float32 weights that depend only on the seed."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(model_config(preset)).float()
    add_offset_heads(model)
    return model


@torch.no_grad()
def add_offset_heads(model: Qwen3ForCausalLM) -> None:
    """Lets the first KV head start as two heads that look 1 and 2 tokens back.

    Look-ups need such heads, and with normalised queries and keys they form slowly.
    One embedding dimension gets the same value for all tokens; queries and keys of
    that head read it into the rotary pairs of highest frequency, the query turned
    ahead by the offset. Everything stays trainable.

    Args:
        model: freshly initialised, mutated.
    """
    config = model.config
    size, pairs = config.head_dim, 3
    model.model.embed_tokens.weight[:, 0] = 0.1
    attention = model.model.layers[0].self_attn
    base = config.rope_parameters["rope_theta"]
    for pair in range(pairs):
        low, high = pair, pair + size // 2
        frequency = base ** (-2 * pair / size)
        attention.k_proj.weight[low, 0] = 0.5
        for head, offset in ((0, 1), (1, 2)):
            angle = torch.tensor(-frequency * offset)
            attention.q_proj.weight[head * size + low, 0] = 0.5 * angle.cos()
            attention.q_proj.weight[head * size + high, 0] = 0.5 * angle.sin()
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight[[low, high]] = 2.0


def example_prompt() -> str:
    """Returns the first problem of ``EXAMPLE`` that training never sees."""
    problems = (generate(*EXAMPLE, seed) for seed in count())
    return next(problem.prompt for problem in problems if held_out(problem))


def export_checkpoint(
    model: Qwen3ForCausalLM, directory: Path, preset: str, note: dict
) -> None:
    """Replaces a checkpoint directory by one rename, so that readers see whole ones.

    Args:
        model: float32 weights, on any device; left as they are.
        directory: target; what it held before is deleted.
        preset: its name; gives the dtype of the stored weights.
        note: figures of the run, written beside the weights as ``training.json``.
    """
    vocab = vocabulary()
    fresh = directory.with_name(directory.name + ".new")
    stale = directory.with_name(directory.name + ".old")
    for path in (fresh, stale):
        shutil.rmtree(path, ignore_errors=True)
    stored = Qwen3ForCausalLM(model_config(preset))
    stored.load_state_dict(model.state_dict())
    stored.to(getattr(torch, PRESETS[preset].stored))
    stored.generation_config = GenerationConfig(
        bos_token_id=vocab[BOS],
        eos_token_id=vocab[EOS],
        pad_token_id=vocab[PAD],
        do_sample=False,
    )
    stored.save_pretrained(fresh)
    save_tokenizer(fresh)
    (fresh / "model.safetensors").chmod(0o644)
    (fresh / "example_prompt.txt").write_text(example_prompt() + "\n")
    (fresh / "training.json").write_text(json.dumps(note, indent=2) + "\n")
    if directory.exists():
        os.replace(directory, stale)
    os.replace(fresh, directory)
    shutil.rmtree(stale, ignore_errors=True)
