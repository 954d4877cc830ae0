"""Forward hooks on a loaded model: what they are attached to, and where they write.

Hooks read and write buffers at fixed addresses, through custom ops, so that
torch.compile traces them and a captured graph replays them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from vllm.utils.torch_utils import direct_register_custom_op

_LIBRARY = torch.library.Library("vllm_kvpolicy", "FRAGMENT")


def custom_op(name: str, mutated: list[str]) -> Callable[[Callable], Callable]:
    """Make a function that writes to arguments, `mutated`, an op of `vllm_kvpolicy`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        direct_register_custom_op(
            name,
            function,
            mutates_args=mutated,
            fake_impl=lambda *_: None,
            target_lib=_LIBRARY,
        )
        return function

    return register


class Buffers(nn.Module):
    """Holds the tensors of a hook, by name.

    A submodule of the module that is hooked: compiled code that vLLM saves and loads
    again finds a module's buffers by their names, but loses tensors that a hook closes
    over.
    """

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)


class HeadLogits(Buffers):
    """Holds `logits` [step_tokens, H] float32 of a layer, and what they come from."""

    def forward(self, values: Tensor) -> None:
        """Write [T, H] values."""
        torch.ops.vllm_kvpolicy.note_head_values(values, self.logits)


@custom_op("note_head_values", ["noted"])
def _note_head_values(values: Tensor, noted: Tensor) -> None:
    """Copy values [T, H] to the first rows of `noted` [>= T, H] float32."""
    noted[: len(values)] = values


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Find a model's decoder layers: the one list of `num_layers` called "layers".

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and name.rpartition(".")[2] == "layers"
        and len(module) == num_layers
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected exactly one list 'layers' of "
            f"{num_layers} decoder layers, found {len(found)}"
        )
    return found[0]


def attention_modules(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the module around each attention layer: projections, norms, rotation.

    Raises:
        ValueError: one of them is not an `attn` of a module.
    """
    parents = {
        id(module.attn): module
        for module in model.modules()
        if isinstance(getattr(module, "attn", None), nn.Module)
    }
    missing = sum(id(layer) not in parents for layer in layers)
    if missing:
        raise ValueError(
            f"{type(model).__name__}: expected each attention layer to be the "
            f"`attn` of a module with its projections, found {missing} that are not"
        )
    return [parents[id(layer)] for layer in layers]
