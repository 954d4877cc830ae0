"""Holds what a model shows of its new tokens, for admissions that decide by it.

Forward hooks on the loaded model's modules write to buffers at fixed addresses, through
a custom op, so that torch.compile traces them and a captured graph replays them.
"""

import torch
from torch import nn
from vllm.utils.torch_utils import direct_register_custom_op


class HeadLogits(nn.Module):
    """Holds the logits of a layer's new tokens, and what they are computed with.

    A submodule of the module that it is hooked to, so that compiled code which vLLM
    saves and loads again finds its buffers by their names.

    Args:
        logits: [step_tokens, H] float32.
        **tensors: further buffers, by name.
    """

    def __init__(self, logits: torch.Tensor, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits, persistent=False)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, values: torch.Tensor) -> None:
        """Write [T, H] values."""
        torch.ops.vllm_kvpolicy.note_head_values(values, self.logits)


def _note_head_values(values: torch.Tensor, noted: torch.Tensor) -> None:
    """Copy values [T, H] to the first rows of `noted` [>= T, H] float32."""
    noted[: len(values)] = values


def _note_head_values_fake(values: torch.Tensor, noted: torch.Tensor) -> None:
    """Return nothing: the op writes to its argument."""


_LIBRARY = torch.library.Library("vllm_kvpolicy", "FRAGMENT")
direct_register_custom_op(
    "note_head_values",
    _note_head_values,
    mutates_args=["noted"],
    fake_impl=_note_head_values_fake,
    target_lib=_LIBRARY,
)
