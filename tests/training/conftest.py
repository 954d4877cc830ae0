"""The tiny models that gates are trained for in these tests."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.training_rows import TEXT
from training.model import Base, load_base


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama folder without a tokenizer, with the RoPE of Llama 3.1."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=rope,
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3(tiny_model: Path) -> Base:
    """The tiny model: 2 layers, 4 query heads, 2 KV heads, head size 32."""
    return load_base(str(tiny_model), "cpu", torch.float32)


@pytest.fixture(scope="session")
def llama(tiny_llama: Path) -> Base:
    """Two layers, 4 query heads, 2 KV heads, head size 16."""
    return load_base(str(tiny_llama), "cpu", torch.float32)


@pytest.fixture(params=["qwen3", "llama"])
def base(request: pytest.FixtureRequest) -> Base:
    return request.getfixturevalue(request.param)


@pytest.fixture
def on_text(tiny_model: Path, tmp_path: Path) -> list[str]:
    """The words that have a trainer read a text for the tiny model, and write `out`."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return [str(tiny_model), "--text", str(text), "--output", str(tmp_path / "out")]
