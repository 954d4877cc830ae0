"""Writes checkpoint folders of models with borrowed channels.

Source: the keys of config.json are those of https://huggingface.co/nvidia/
Qwen3-8B-DMS-8x. Deviations: no code is included. A library that does not know these
keys loads the folder as an ordinary model and attends with the channels that decide.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from vllm_kvpolicy.train.dms.retrofit import Retrofit


@torch.no_grad()
def save_checkpoint(
    folder: Path, retrofit: Retrofit, model: str, target: float
) -> None:
    """Write the student in the dtype of the model's config; overwrites the folder.

    Args:
        folder: to write to.
        retrofit: one with borrowed channels.
        model: folder or name of the original model, for its tokenizer.
        target: compression ratio reached.
    """
    settings, student = retrofit.settings, retrofit.student.model
    config = AutoConfig.from_pretrained(model)
    dtype = config.dtype or torch.float32
    made: dict[int, torch.Tensor] = {}  # by address, so that tied weights stay tied
    weights = {
        name: made.setdefault(tensor.data_ptr(), tensor.to(dtype))
        for name, tensor in student.state_dict().items()
    }
    student.save_pretrained(folder, state_dict=weights)
    for path in folder.glob("*.safetensors"):
        path.chmod(path.stat().st_mode | 0o444)  # a server may run as another user
    config.dms_window_size = settings.window
    config.dms_cr = int(target) if target == int(target) else target
    config.dms_alpha_scale = settings.alpha_scale
    config.dms_initial_alpha_offset = settings.alpha_offset
    config.dms_separate_alpha = False
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
