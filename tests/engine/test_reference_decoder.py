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


def test_a_mask_hides_what_it_hides(tiny_model: Path) -> None:
    """Hiding the first 50 tokens from the last query alone changes only its logits."""
    decoder = ReferenceDecoder(tiny_model)
    tokens = make_prompt(2, 120)
    visible = torch.ones(120, 120, dtype=torch.bool).tril()
    visible = visible.repeat(decoder.num_layers, decoder.num_heads, 1, 1)
    visible[:, 1, -1, :50] = False
    full, masked = decoder.forward(tokens), decoder.forward(tokens, visible)
    difference = (full.logits - masked.logits).abs().amax(-1)
    assert difference[:-1].max() == 0
    assert difference[-1] > 0.01
