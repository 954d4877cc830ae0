"""Folders with the files, keys and tensor names of released checkpoints, made tiny."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from support.tiny_model import make_tiny_model

# Keys that nvidia/Qwen3-8B-DMS-8x has beside those of its base model; its code is in
# https://github.com/westers/kvcompress/tree/d32ed56/dms_local. It names no
# architectures, and no tokenizer is with it.
DMS_KEYS = {
    "dms_alpha_scale": 100.0,
    "dms_cr": 8,
    "dms_initial_alpha_offset": 5.0,
    "dms_window_size": 512,
    "auto_map": {
        "AutoConfig": "configuration_qwen3_dms.Qwen3Config",
        "AutoModelForCausalLM": "modeling_qwen3_dms.Qwen3ForCausalLM",
    },
    "max_window_layers": 36,
    "rope_scaling": None,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
DMS_CODE = (
    "configuration_qwen3_dms",
    "dms_attention",
    "dms_cache",
    "modeling_qwen3_dms",
)


def make_released_dms(folder: Path) -> Path:
    """Write a model like nvidia/Qwen3-8B-DMS-8x: shards, and code that must not run."""
    make_tiny_model(folder)
    for path in [*folder.glob("tokenizer*"), folder / "generation_config.json"]:
        path.unlink()
    config = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "bos_token_id", "eos_token_id", "pad_token_id"):
        del config[key]
    config |= {**DMS_KEYS, "layer_types": ["full_attention"] * 2}
    (folder / "config.json").write_text(json.dumps(config))
    for name in DMS_CODE:
        (folder / f"{name}.py").write_text("raise RuntimeError('code of a checkpoint')")
    whole = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(whole).items()}
    whole.unlink()
    places = {}
    for shard in range(4):
        file = f"model-{shard + 1:05}-of-00004.safetensors"
        part = dict(list(tensors.items())[shard::4])
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
