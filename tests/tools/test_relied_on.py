"""What we override and read of vLLM: every use has a row, and bears every release."""

import ast
import inspect
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from pkgutil import walk_packages
from unittest.mock import MagicMock

import pytest

import vllm_kvpolicy
from tools.vllm_surface import rows as surface
from tools.vllm_surface.__main__ import RECORDS, open_release
from tools.vllm_surface.relied_on import OWNERS
from vllm_kvpolicy import compat

PACKAGE = vllm_kvpolicy.__name__
FLASHINFER = f"{PACKAGE}.worker.backends.flashinfer"
# Python puts these into classes by itself.
MADE_BY_PYTHON = {
    "__slotnames__",  # by `copyreg`, once an object was pickled
    *vars(type("Empty", (), {})),
    *("__abstractmethods__", "_abc_impl", "__annotations__", "__parameters__"),
    *("__subclasshook__", "_is_protocol", "__orig_bases__"),
}
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MADE_BY_DATACLASSES = {
    *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__init__"),
    *("__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__", "__replace__"),
}


@pytest.fixture
def modules(monkeypatch):
    """Every module of the package, FlashInfer's with a stand-in for the library."""
    found = walk_packages(vllm_kvpolicy.__path__, f"{PACKAGE}.")
    # The libraries of operators are no modules of Python's.
    names = {each.name for each in found if not each.name.startswith(f"{PACKAGE}._C")}
    names -= {f"{PACKAGE}.__main__", FLASHINFER}
    loaded = [import_module(name) for name in sorted(names)]
    before = set(sys.modules)
    if "flashinfer" not in sys.modules:
        for name in ("", ".comm", ".decode", ".prefill", ".utils"):
            library = MagicMock(__spec__=ModuleSpec("flashinfer", None))
            monkeypatch.setitem(sys.modules, f"flashinfer{name}", library)
    yield [*loaded, import_module(FLASHINFER)]
    for name in set(sys.modules) - before:
        if name.endswith(".flashinfer"):
            del sys.modules[name]


def classes_of(modules):
    """Return the classes that modules define on top of one of vLLM's."""
    return {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and any(is_of_vllm(base) for base in value.__mro__)
    }


def is_of_vllm(cls):
    return cls.__module__.split(".")[0] == "vllm"


def overrides_of(cls):
    """Yield "module:Class.name" of each definition of vLLM that a class stands for."""
    lineage = cls.__mro__
    for index, ours in enumerate(lineage):
        if ours.__module__.split(".")[0] != PACKAGE:
            continue
        names = vars(ours).keys() - MADE_BY_PYTHON
        if "__dataclass_params__" in vars(ours):
            names -= MADE_BY_DATACLASSES
        for name in names:
            for base in lineage[index + 1 :]:
                if is_of_vllm(base) and name in vars(base):
                    yield f"{base.__module__}:{base.__qualname__}.{name}"
                    break


def inherited_abstract_methods(cls):
    """Yield ("module:Class", method) for each that no class of vLLM in between has."""
    for base in cls.__bases__:
        if is_of_vllm(base):
            for name in getattr(base, "__abstractmethods__", ()):
                owner = next(each for each in base.__mro__ if name in vars(each))
                yield f"{owner.__module__}:{owner.__qualname__}", name


def rows():
    return {owner.path(name) for owner in OWNERS for name in owner.overridden}


def test_every_override_has_a_row_and_every_row_an_override(modules):
    found = {each for cls in classes_of(modules) for each in overrides_of(cls)}
    assert len(found) > 30
    assert found - rows() == set()
    assert rows() - found == set()


def test_every_abstract_method_that_is_ours_to_have_has_a_row(modules):
    listed = {
        (owner.target, name)
        for owner in OWNERS
        for name in (owner.abstract or "").split()
    }
    found = {
        each for cls in classes_of(modules) for each in inherited_abstract_methods(cls)
    }
    assert found == listed != set()


@pytest.mark.parametrize("minor", compat.RELEASES)
def test_every_override_takes_what_a_release_gives(modules, minor):
    """What vLLM takes by position or by name is given by position here."""
    _, look = open_release(str(RECORDS / f"{minor}.json"))
    listed = {row.target: row for row in surface.rows()}
    num_checked = 0
    for cls in classes_of(modules):
        for target in overrides_of(cls):
            ours = inspect.getattr_static(cls, target.rpartition(".")[2])
            if listed[target].wanted is not None:  # else it hands on whatever it gets
                bind(ours, look(listed[target]))
                num_checked += 1
    assert num_checked > 30


BINDINGS = {"@property": property, "@classmethod": classmethod}
BINDINGS["@staticmethod"] = staticmethod


def bind(ours, declared):
    """Call what we put in the place of a declaration as vLLM may; TypeError."""
    words = [word for word in declared.split() if word not in ("/", "async")]
    binding = BINDINGS.get(words[0], object)
    if binding is not object:
        del words[0]
    found = next((kind for kind in BINDINGS.values() if isinstance(ours, kind)), object)
    function = getattr(ours, "fget", getattr(ours, "__func__", ours))
    if (found, binding) == (classmethod, staticmethod):  # both are called by the class
        found, words = binding, ["cls", *words]
    if found is not binding:
        raise TypeError(f"{ours} is bound as {found.__name__}, not {binding.__name__}")
    if inspect.iscoroutinefunction(function) is not ("async" in declared.split()):
        raise TypeError(f"{ours} or vLLM's is async, not both")
    split = words.index("*") if "*" in words else len(words)
    signature = inspect.signature(function)
    named = {
        name
        for name, each in signature.parameters.items()
        if each.kind is each.KEYWORD_ONLY and name in words
    } | set(words[split + 1 :])
    by_position = [word for word in words[:split] if word not in named]
    signature.bind(*by_position, **dict.fromkeys(named))


@pytest.mark.parametrize("minor", compat.RELEASES)
def test_every_class_can_be_made_with_every_release(modules, minor):
    _, look = open_release(str(RECORDS / f"{minor}.json"))
    for row in surface.rows():
        if row.kind == surface.ABSTRACT:
            ours = [
                cls
                for cls in classes_of(modules)
                if row.target in {f"{b.__module__}:{b.__name__}" for b in cls.__bases__}
            ]
            assert ours
            for cls in ours:
                assert set(look(row).split()) <= vars(cls).keys(), cls


def private_names_of_others():
    """Return names `_x` that the package reads or passes, and nowhere defines.

    Those of PyTorch, which vLLM pins, do not count.
    """
    read, defined = set(), {"_asdict"}  # of named tuples, documented
    for path in Path(vllm_kvpolicy.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, DEFINITIONS):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.keyword):
                read.add(node.arg or "")
            elif isinstance(node, ast.Attribute):
                if ast.unparse(node).startswith("torch."):
                    continue
                is_read = isinstance(node.ctx, ast.Load)
                (read if is_read else defined).add(node.attr)
    return {
        name
        for name in read - defined
        if name.startswith("_") and not name.startswith("__")
    }


def test_every_private_name_of_vllm_has_a_row():
    known = {name for owner in OWNERS for name in owner.read.split()}
    found = private_names_of_others()
    assert {"_null_block", "_num_computed_tokens_cache"} <= found
    assert found <= known
