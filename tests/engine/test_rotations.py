"""Models that rotate in other ways than the tiny one: the recommended policy runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.helpers import Job, make_prompt, serve
from support.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tokenizer

SIZE = 32
THETA = {"rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 12,
    "long_factor": [1.0 + i for i in range(12)],
    "partial_rotary_factor": 0.75,
    **THETA,
}
WINDOWS = {
    "sliding_window": 48,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
BY_KIND = {
    "sliding_attention": {"rope_type": "default", **THETA},
    "full_attention": {**YARN, **THETA},
}
PLAIN = {"rope_type": "default", **THETA}
# Two of them run in vLLM's Transformers backend: smollm3 and olmo3.
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONG},
    "glm4": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    "smollm3": {"rope_parameters": PLAIN, "no_rope_layers": [1, 1, 1, 0]},
    "exaone4": {"rope_parameters": PLAIN, **WINDOWS, "sliding_window_pattern": 4},
    "olmo3": {"rope_parameters": BY_KIND, **WINDOWS},
}


def make(kind: str, folder: Path) -> Path:
    """Write a random model of four layers, float32; return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=99,
        hidden_size=4 * SIZE,
        head_dim=SIZE,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
        **MODELS[kind],
    )
    torch.manual_seed(6)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )
    write_tokenizer(folder, [*SPECIAL_TOKENS, *CHARACTERS], 2048)
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_ams_expected_runs(kind: str, tmp_path: Path) -> None:
    """A budget that never binds gives stock vLLM's tokens, a small one has events."""
    model = make(kind, tmp_path / kind)
    free, bound = (
        Job(name, make_prompt(9, 300), 45, extra_args={"kv_budget": budget})
        for name, budget in (("free", 2048), ("bound", 128))
    )
    values: dict[str, Any] = {"policy": "ams-expected", "budget": 2048}
    values |= {"interval": 40, "policy_config": {"expected_window": 40}}
    run = serve(model, values, [free, bound], tmp_path / "trace")
    stock = serve(model, None, [Job("free", free.prompt, free.max_tokens)])
    ours = run.results["free"]
    assert ours.tokens == stock.results["free"].tokens and not ours.events
    assert len(run.results["bound"].events) >= 2
