"""A model to hook, as far as captures ask for its sizes."""

from types import SimpleNamespace

import torch
from torch import nn

from vllm_kvpolicy.policies.base import LoadedModel


def loaded_model(
    layers: int,
    requests: int,
    longest: int,
    step_tokens: int,
    width: int,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Return a model of float32 numbers whose modules are not there."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=longest, dtype=torch.float32, get_hidden_size=lambda: width
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=requests, max_num_batched_tokens=step_tokens
        ),
    )
    return LoadedModel(nn.Module(), [None] * layers, config, torch.device(device))
