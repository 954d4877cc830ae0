"""Makes a model hub's cache of what vLLM's tests ask of models.

Tests of the scheduler read a model's configuration alone. Each of them gets one that
has what they look at, and the tokenizer of the packaged model.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from tools.vllm_tests import chosen
from tools.vllm_tests.source import ROOT

CHECKPOINT = ROOT / "reasoner" / "checkpoint"
REVISION = f"{1:040x}"
_OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "dtype": "float16"}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
# Reads images, and vLLM reads its class without packages that need a GPU.
_ISAAC = {
    **_QWEN3,
    "architectures": ["IsaacForConditionalGeneration"],
    "model_type": "isaac",
    "text_config": _QWEN3 | {"rope_scaling": {"rope_type": "default"}},
    "vision_config": {"num_patches": 256, "patch_size": 16},
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _OPT,
    "facebook/opt-350m": _OPT | {"hidden_size": 1024, "num_attention_heads": 16},
    "Qwen/Qwen3-0.6B": _QWEN3,
    "llava-hf/llava-1.5-7b-hf": _ISAAC,
    "Qwen/Qwen2.5-VL-3B-Instruct": _ISAAC,
}
# Models of the tests that start engines.
SERVED = (
    "Qwen/Qwen3-0.6B",
    "distilbert/distilgpt2",
    "facebook/opt-125m",
    "hmellor/tiny-random-LlamaForCausalLM",
    "meta-llama/Llama-3.2-1B-Instruct",
)


def make(folder: Path, group: str) -> None:
    """Write the cache into a folder, as `HF_HOME` names it.

    Args:
        folder: of the cache.
        group: of tests; for CONFIGURATIONS no model has weights.
    """
    for name in CONFIGURATIONS if group == chosen.CONFIGURATIONS else SERVED:
        base = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = base / "snapshots" / REVISION
        shutil.rmtree(base, ignore_errors=True)
        (base / "refs").mkdir(parents=True)
        (base / "refs" / "main").write_text(REVISION)
        shutil.copytree(CHECKPOINT, snapshot)
        if group == chosen.CONFIGURATIONS:
            (snapshot / "model.safetensors").unlink()
            (snapshot / "config.json").write_text(json.dumps(CONFIGURATIONS[name]))
