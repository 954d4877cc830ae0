"""A multimodal checkpoint with the weights of a text model."""

import json
import shutil
from pathlib import Path

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

    Args:
        folder: to write; not there yet.
        text_model: folder of `make_tiny_model`.

    Returns:
        The folder.
    """
    shutil.copytree(text_model, folder)
    place = folder / "config.json"
    config = json.loads(place.read_text())
    rotation = {"rope_type": "default", "mrope_interleaved": True}
    text = {**config, "rope_scaling": rotation}
    del text["architectures"]
    names = {
        "architectures": ["IsaacForConditionalGeneration"],
        "model_type": "isaac",
    }
    parts = {"text_config": text, "vision_config": VISION}
    place.write_text(json.dumps({**text, **names, **parts}))
    return folder
