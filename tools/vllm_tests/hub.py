"""Makes a model hub's cache of what vLLM's tests ask of models.

Tests of the scheduler read a model's configuration alone. Each of them gets one that
has what they look at, and the tokenizer of the packaged model.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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
# Models of the tests that start engines and servers: all are the packaged one, trained
# on shorter texts than some of the tests ask for.
SERVED = (
    "HuggingFaceH4/zephyr-7b-beta",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "distilbert/distilgpt2",
    "facebook/opt-125m",
    "hmellor/tiny-random-LlamaForCausalLM",
    "meta-llama/Llama-3.2-1B-Instruct",
)
LONGER = {"max_position_embeddings": _QWEN3["max_position_embeddings"]}
ADAPTER = "typeof/zephyr-7b-beta-lora"
RANK = 8


def make(folder: Path, group: str) -> None:
    """Write the cache into a folder, as `HF_HOME` names it.

    Args:
        group: of tests; for CONFIGURATIONS no model has weights.
    """
    for name in CONFIGURATIONS if group == chosen.CONFIGURATIONS else SERVED:
        snapshot = _new_snapshot(folder, name)
        shutil.copytree(CHECKPOINT, snapshot)
        config = json.loads((CHECKPOINT / "config.json").read_text())
        if group == chosen.CONFIGURATIONS:
            (snapshot / "model.safetensors").unlink()
            config = CONFIGURATIONS[name]
        elif group == chosen.SERVERS:
            config |= LONGER
        (snapshot / "config.json").write_text(json.dumps(config))
    if group == chosen.SERVERS:
        _write_adapter(_new_snapshot(folder, ADAPTER))


def _new_snapshot(folder: Path, name: str) -> Path:
    """Return where the only revision of a repository goes, which is not there yet."""
    base = folder / "hub" / f"models--{name.replace('/', '--')}"
    shutil.rmtree(base, ignore_errors=True)
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(REVISION)
    return base / "snapshots" / REVISION


def _write_adapter(folder: Path) -> None:
    """Write an adapter of the packaged model that changes nothing."""
    folder.mkdir(parents=True)
    path = "model.layers.0.self_attn.o_proj"
    rows, columns = load_file(CHECKPOINT / "model.safetensors")[f"{path}.weight"].shape
    sizes = {"A": (RANK, columns), "B": (rows, RANK)}
    tensors = {
        f"base_model.model.{path}.lora_{letter}.weight": torch.zeros(size)
        for letter, size in sizes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    config["target_modules"] = ["o_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
