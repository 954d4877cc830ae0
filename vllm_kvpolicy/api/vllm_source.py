"""Tells what the classes of a vLLM have from its compiled files, without running them.

So a start can check what workers and engines rely on in a process that loads neither,
and on a machine that lacks what some of the modules import; and a release can be judged
that is not installed.
"""

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType


class VllmSource:
    """The modules of one vLLM.

    Args:
        load: returns the code of a module by its name, None where there is none.
    """

    def __init__(self, load: Callable[[str], CodeType | None]) -> None:
        self._module = cache(load)

    def defines(self, target: str) -> bool:
        """Return whether vLLM has a module, class, function, method or attribute.

        A class has what its body names and what its methods assign as attributes; what
        only a base class has does not count.

        Args:
            target: "module:name" or "module:Class.name".
        """
        owner, name = self._owner(target)
        if owner is not None and name in _names(owner):
            return True
        is_module = "." not in target.partition(":")[2]
        return is_module and self._module(target.replace(":", ".")) is not None

    def parameters(self, target: str) -> tuple[str, ...] | None:
        """Return a function's parameters in the order of `inspect.signature`.

        The class that a class method takes is left out.

        Args:
            target: as for `defines`.

        Returns:
            Names; None where vLLM has no such function.
        """
        owner, name = self._owner(target)
        code = None if owner is None else _code_of(owner, name)
        return None if code is None else parameter_names(code)

    def abstract_methods(self, target: str) -> tuple[str, ...]:
        """Return the methods that a class leaves to its subclasses, in order.

        Args:
            target: "module:Class".
        """
        owner, name = self._owner(target)
        body = None if owner is None else _code_of(owner, name)
        return () if body is None else tuple(_abstract(body))

    def _owner(self, target: str) -> tuple[CodeType | None, str]:
        """Return the code of the module or class body that would define a name."""
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        owner = self._module(module)
        for parent in parents:
            owner = None if owner is None else _code_of(owner, parent)
        return owner, name


def parameter_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of a function's parameters, see `VllmSource.parameters`."""
    names = iter(code.co_varnames)
    positional = [next(names) for _ in range(code.co_argcount)]
    keywords = [next(names) for _ in range(code.co_kwonlyargcount)]
    rest = [next(names)] if code.co_flags & inspect.CO_VARARGS else []
    keywords += [next(names)] if code.co_flags & inspect.CO_VARKEYWORDS else []
    if positional[:1] == ["cls"]:
        positional = positional[1:]
    return (*positional, *rest, *keywords)


@cache
def installed() -> VllmSource:
    """Return the vLLM of this environment, which need not be imported."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed")
    parent = Path(spec.origin).parents[1]

    def load(module: str) -> CodeType | None:
        """Return the code of a module, from Python's cache where it is up to date."""
        for path in map(parent.joinpath, files_of(module)):
            if path.is_file():
                return SourceFileLoader(module, str(path)).get_code(module)
        return None

    return VllmSource(load)


def files_of(module: str) -> tuple[str, str]:
    """Return the two files, within a wheel, of which one may be a module."""
    base = module.replace(".", "/")
    return f"{base}.py", f"{base}/__init__.py"


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


def _abstract(body: CodeType) -> Iterator[str]:
    """Yield the names of the functions that a class body makes abstract."""
    is_abstract = False
    for each in dis.get_instructions(body):
        if each.opname == "STORE_NAME":
            if is_abstract:
                yield each.argval
            is_abstract = False
        elif each.opname.startswith("LOAD_"):
            is_abstract |= each.argval == "abstractmethod"


def _code_of(owner: CodeType, name: str) -> CodeType | None:
    """Return the last function or class body of a name that a piece of code makes."""
    found = [code for code in _codes(owner) if code.co_name == name]
    return found[-1] if found else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions and class bodies that a piece of code makes."""
    return (each for each in code.co_consts if isinstance(each, CodeType))
