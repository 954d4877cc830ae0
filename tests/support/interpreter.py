"""Makes Triton's interpreter spend its time on kernels.

At each launch, and at each call of one function in Triton by another, `tl.cdiv` among
them, it goes through all members of `triton.language` for those to patch. That was most
of what small kernels took.
"""

import inspect
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang
_patched: set[str] = set()  # languages, until the end of the launch


def patch_once() -> None:
    """Patch a language once in a launch, and find its members once in a process."""
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = _patch_what_is_not
    interpreter._patch_builtin = _patch_builtins


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
