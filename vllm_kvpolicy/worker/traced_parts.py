"""Describes what policies have put into a model that vLLM is about to compile.

Two engines may share compiled code where this is equal, whatever their budgets: then
the same operations run over buffers of the same shapes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

PACKAGE = __name__.partition(".")[0]
PREFIX = "kv_policy_"  # of the submodules that hooks read
HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # where PyTorch keeps them
CONSTANTS = int | float | str | bool | None


def traced_parts(model: nn.Module, layers: Sequence[Any]) -> list[str]:
    """Return a line for each hook, each module that hooks read, and for attention.

    Args:
        model: vLLM's model with all hooks attached.
        layers: its attention layers.

    Raises:
        TypeError: compiled code would depend on something that cannot be described.
    """
    parts = [f"attention {_name(layer.attn_backend)}" for layer in layers]
    for path, module in model.named_modules():
        parts += [f"{path}: hook {_name(hook)}" for hook in _own_hooks(module)]
        if PREFIX in path:
            parts.append(f"{path}: {_module_text(module)}")
    return parts


def _own_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    own = [
        hook
        for kind in HOOKS
        for hook in vars(module)[kind].values()
        if _package(hook) == PACKAGE
    ]
    for hook in own:
        if not isinstance(hook, FunctionType) or hook.__closure__:
            raise TypeError(
                f"forward hook: got {hook!r}, expected a plain function: what else it "
                "holds would be part of compiled code"
            )
    return own


def _module_text(module: nn.Module) -> str:
    """Return class, constants, and names, dtypes and layouts of tensors."""
    constants = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    for name, value in constants.items():
        if not isinstance(value, CONSTANTS):
            raise TypeError(
                f"{name} of {_name(type(module))}: got {type(value).__name__}, "
                "expected a buffer, a number or a string"
            )
    own = *module.named_buffers(recurse=False), *module.named_parameters(recurse=False)
    tensors = [
        f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.stride()}"
        for name, tensor in own
    ]
    return f"{_name(type(module))} {constants} {tensors}"


def _package(item: Any) -> str:
    """Return the package of a function, or of the class of anything else."""
    while isinstance(item, partial):
        item = item.func
    home = getattr(item, "__module__", None) or type(item).__module__
    return str(home).partition(".")[0]


def _name(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"
