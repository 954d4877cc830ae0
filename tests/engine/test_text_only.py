"""The text part of multimodal models: it answers as a text model of its weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.engine.helpers import OWN, Engine, jobs_of, serve

VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_patches": 16,
    "patch_size": 16,
}


def make_multimodal(folder: Path, text_model: Path) -> Path:
    """Write an Isaac model whose text part is a Qwen3 model.

    Its text part rotates with M-RoPE, where each token has a position in time, height
    and width; the three are equal in text. There are no weights for images.
    """
    shutil.copytree(text_model, folder)
    place = folder / "config.json"
    config = json.loads(place.read_text())
    rotation = {"rope_type": "default", "mrope_interleaved": True}
    text = {**config, "rope_scaling": rotation}
    del text["architectures"]
    names = {"architectures": ["IsaacForConditionalGeneration"], "model_type": "isaac"}
    parts = {"text_config": text, "vision_config": VISION}
    place.write_text(json.dumps({**text, **names, **parts}))
    return folder


LENGTHS = (40, 150, 300)
VALUES: dict[str, Any] = {"budget": 128, "interval": 64, "prefill_interval": 128}
# `expected` turns queries to later positions, by the model's own rotation.
OFFERED = ("ams-tova", "expected", "adakv-snapkv")
SERVER = {
    "policy": OFFERED[0],
    "allow": list(OFFERED[1:]),
    "policy_config": {"expected_window": 48},
    **VALUES,
}
IDENTITY = {"policy": "identity", **VALUES}


@pytest.fixture(scope="module")
def multimodal(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a multimodal model with the tiny model's weights."""
    return make_multimodal(tmp_path_factory.mktemp("isaac") / "model", tiny_model)


def test_text_is_answered_as_by_a_text_model(
    tiny_model: Path, multimodal: Path
) -> None:
    changes = {"language_model_only": True, "enable_prefix_caching": True}
    jobs = jobs_of((*OFFERED, "none"), LENGTHS, 120)
    expected = serve(tiny_model, SERVER, jobs).tokens
    with Engine(multimodal, SERVER, **changes) as engine:
        assert engine.llm.llm_engine.vllm_config.model_config.uses_mrope
        assert engine.run(jobs).tokens == expected
        assert engine.run(jobs).tokens == expected, "with prompts from the cache"
        assert engine.counters()["events"] >= 30
    longest = {tuple(expected[f"{name} 300"]) for name in (*OFFERED, "none")}
    assert len(longest) == len(OFFERED) + 1
    with Engine(multimodal, IDENTITY, **changes) as engine:
        moved = engine.run(jobs_of([OWN], LENGTHS, 120)).tokens
        assert engine.counters()["events"] >= 5
        for length in LENGTHS:
            assert moved[f"{OWN} {length}"] == expected[f"none {length}"]
        with pytest.raises(ValueError, match="Multi-modal processor"):
            engine.llm.generate({"prompt": "x", "multi_modal_data": {"image": "y"}})
