"""Makes Triton's interpreter spend its time on kernels.

At each launch, and at each call of one function in Triton by another, `tl.cdiv` among
them, it goes through all members of `triton.language` for those to patch. That was most
of what small kernels took. And it rounds numbers as a GPU does.
"""

import inspect
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_patch_language = interpreter._patch_lang
_patched: set[str] = set()  # languages, until the end of the launch


def patch_once() -> None:
    """Patch a language once in a launch, and find its members once in a process."""
    interpreter._convert_float = _convert
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = _patch_what_is_not
    interpreter._patch_builtin = _patch_builtins


def _convert(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Return bits of numbers of another type, rounded as a GPU does.

    The interpreter's own conversion loses a carry out of the mantissa.
    """
    bits = f"uint{given.primitive_bitwidth}"
    stored = torch.from_numpy(np.frombuffer(values.tobytes(), bits).copy())
    found = stored.view(TYPES[given.name]).to(TYPES[wanted.name])
    own = getattr(torch, f"uint{wanted.primitive_bitwidth}")
    return found.view(own).numpy().reshape(values.shape)


class Scope(interpreter._LangPatchScope):
    """What a launch has patched."""

    def restore(self) -> None:
        """Undo it, as after a launch."""
        super().restore()
        _patched.clear()


def _patch_what_is_not(function: Any) -> Scope:
    if _languages(function) <= _patched:
        return Scope()
    _patched.update(_languages(function))
    return _patch_language(function)


@cache
def _languages(function: Any) -> set[str]:
    values = [v for v in function.__globals__.values() if inspect.ismodule(v)]
    return {each.__name__ for each in (tl, tl.core) if each in values}


@cache
def _builtins(home: Any) -> list[str]:
    return [name for name, each in inspect.getmembers(home) if tl.core.is_builtin(each)]


def _patch_builtins(home: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(home):
        member = getattr(home, name)
        if tl.core.is_builtin(member):  # it is not once it is patched
            interpreter._patch_attr(home, name, member, builder, scope)
