"""The decoder behind the oracles is the published architecture."""

from pathlib import Path

import pytest
import torch

from support.engine.helpers import make_prompt
from support.engine.reference_decoder import ReferenceDecoder
from support.tiny_model import make_tiny_model

TOLERANCE = 1e-4
SHAPES = [{}, {"layers": 3, "query_heads": 6, "kv_heads": 3, "head_dim": 64}]


def transformers_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: dict) -> None:
    folder = make_tiny_model(tmp_path, **shape)
    tokens = make_prompt(1, 700)
    seen = ReferenceDecoder(folder).forward(tokens)
    expected = transformers_logits(folder, tokens)
    assert (seen.logits - expected).abs().max() < TOLERANCE
