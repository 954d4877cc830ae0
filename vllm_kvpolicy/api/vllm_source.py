"""Tells what the classes of vLLM have from its compiled files, without running them.

So a start can check what workers and engines rely on in a process that loads neither,
and on a machine that lacks what some of the modules import.
"""

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import vllm


def defines(target: str) -> bool:
    """Return whether vLLM has a class, function, method or attribute.

    A class has what its body names and what its methods assign as attributes; what only
    a base class has does not count.

    Args:
        target: "module:name" or "module:Class.name".
    """
    owner, name = _owner(target)
    return owner is not None and name in _names(owner)


def parameters(target: str) -> tuple[str, ...] | None:
    """Return a function's parameters in the order of `inspect.signature`.

    The class that a class method takes is left out.

    Args:
        target: as for `defines`.

    Returns:
        Names; None where vLLM has no such function.
    """
    owner, name = _owner(target)
    functions = [] if owner is None else [c for c in _codes(owner) if c.co_name == name]
    return parameter_names(functions[-1]) if functions else None


def parameter_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of a function's parameters, see `parameters`."""
    names = iter(code.co_varnames)
    positional = [next(names) for _ in range(code.co_argcount)]
    keywords = [next(names) for _ in range(code.co_kwonlyargcount)]
    rest = [next(names)] if code.co_flags & inspect.CO_VARARGS else []
    keywords += [next(names)] if code.co_flags & inspect.CO_VARKEYWORDS else []
    if positional[:1] == ["cls"]:
        positional = positional[1:]
    return (*positional, *rest, *keywords)


def _owner(target: str) -> tuple[CodeType | None, str]:
    """Return the code of the module or class body that would define a name."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = _module(module)
    for parent in parents:
        bodies = [] if owner is None else _codes(owner)
        owner = next((code for code in bodies if code.co_name == parent), None)
    return owner, name


@cache
def _module(name: str) -> CodeType | None:
    """Return the code of a module, from Python's cache where it is up to date."""
    base = Path(vllm.__file__).parents[1].joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return SourceFileLoader(name, str(path)).get_code(name)
    return None


@cache
def _names(owner: CodeType) -> frozenset[str]:
    """Return the names that a module or class body defines."""
    stored = {
        each.argval
        for each in dis.get_instructions(owner)
        if each.opname in ("STORE_NAME", "STORE_GLOBAL")
    }
    # Fields without a default leave no more than their names.
    annotated = {each for each in owner.co_consts if isinstance(each, str)}
    assigned = {
        each.argval
        for method in _codes(owner)
        for each in dis.get_instructions(method)
        if each.opname == "STORE_ATTR"
    }
    return frozenset(stored | annotated | assigned)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions and class bodies that a piece of code makes."""
    return (each for each in code.co_consts if isinstance(each, CodeType))
