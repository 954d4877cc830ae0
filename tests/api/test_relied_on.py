"""What we override and read of vLLM: every use has a row, every change is found."""

import ast
import inspect
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from pkgutil import walk_packages
from unittest.mock import MagicMock

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

import vllm_kvpolicy
from vllm_kvpolicy.api import relied_on, vllm_source
from vllm_kvpolicy.api.patch_table import Patch
from vllm_kvpolicy.api.relied_on import OWNERS, Owner

PACKAGE = vllm_kvpolicy.__name__
FLASHINFER = f"{PACKAGE}.worker.backends.flashinfer"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
# Python puts these into classes by itself.
MADE_BY_PYTHON = {
    "__slotnames__",  # by `copyreg`, once an object was pickled
    *vars(type("Empty", (), {})),
    *("__abstractmethods__", "_abc_impl", "__annotations__", "__parameters__"),
    *("__subclasshook__", "_is_protocol", "__orig_bases__"),
}
MADE_BY_DATACLASSES = {
    *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__init__"),
    *("__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__", "__replace__"),
}


@pytest.fixture
def modules(monkeypatch):
    """Every module of the package, FlashInfer's with a stand-in for the library."""
    found = walk_packages(vllm_kvpolicy.__path__, f"{PACKAGE}.")
    names = {each.name for each in found} - {f"{PACKAGE}.__main__", FLASHINFER}
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
        if ours.__module__.split(".")[0] not in (PACKAGE, __name__):
            continue
        names = vars(ours).keys() - MADE_BY_PYTHON
        if "__dataclass_params__" in vars(ours):
            names -= MADE_BY_DATACLASSES
        for name in names:
            for base in lineage[index + 1 :]:
                if is_of_vllm(base) and name in vars(base):
                    yield f"{base.__module__}:{base.__qualname__}.{name}"
                    break


def rows():
    return {owner.path(name) for owner in OWNERS for name in owner.overridden}


def test_the_tables_hold_against_this_vllm():
    assert relied_on.problems(None) == []


def test_every_override_has_a_row_and_every_row_an_override(modules):
    found = {each for cls in classes_of(modules) for each in overrides_of(cls)}
    assert len(found) > 30
    assert found - rows() == set()
    assert rows() - found == set()


def test_an_override_without_a_row_is_found():
    mine = type("Mine", (Scheduler,), {"schedule": None, "__module__": __name__})
    assert set(overrides_of(mine)) - rows() == {f"{SCHEDULER}.schedule"}


def private_names_of_others():
    """Return names `_x` that the package reads or passes, and nowhere defines."""
    read, defined = set(), {"_asdict"}  # of named tuples, documented
    for path in Path(vllm_kvpolicy.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.keyword):
                read.add(node.arg or "")
            elif isinstance(node, ast.Attribute):
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


def test_a_changed_signature_is_found():
    patch = Patch("vllm.engine.arg_utils:EngineArgs.add_cli_args", ("x",), "", "")
    owner = Owner(SCHEDULER, {"add_request": "self request x"})
    problems = relied_on.problems(None, (patch,), (owner,))
    assert "EngineArgs.add_cli_args takes parser, expected x" in problems[0]
    assert f"{SCHEDULER}.add_request takes self, request, expected" in problems[1]
    assert all("install vLLM 0.32.x" in problem for problem in problems)


@pytest.mark.parametrize(
    "owner",
    [
        Owner(SCHEDULER, {"nothing": "self"}),
        Owner(SCHEDULER, {"nothing": relied_on.ANY}),
        Owner(SCHEDULER, read="nothing"),
        Owner("vllm.v1.core.sched.scheduler:Nothing", read="nothing"),
        Owner("vllm.v1.core.sched.nothing", read="nothing"),
    ],
)
def test_what_is_gone_is_found(owner):
    (problem,) = relied_on.problems(None, (), (owner,))
    assert problem == f"vLLM has no {owner.path('nothing')}: install vLLM 0.32.x"


def test_an_attribute_in_place_of_a_method_is_found():
    owner = Owner(SCHEDULER, {"running": "self"})
    (problem,) = relied_on.problems(None, (), (owner,))
    assert f"{SCHEDULER}.running is not a function" in problem


def test_rows_of_other_platforms_are_left_out():
    owner = Owner(SCHEDULER, read="nothing", platform="cuda")
    counts = {
        platform: len(relied_on.problems(platform, (), (owner,)))
        for platform in ("cpu", "cuda", None)
    }
    assert counts == {"cpu": 0, "cuda": 1, None: 1}


def test_the_check_imports_nothing():
    vllm_source._module.cache_clear()
    before = set(sys.modules)
    assert relied_on.problems(None) == []
    assert set(sys.modules) == before


def test_parameters_are_listed_as_inspect_lists_them():
    names = ("schedule", "add_request", "_preempt_request", "__init__", "_free_request")
    for name in names:
        listed = tuple(inspect.signature(vars(Scheduler)[name]).parameters)
        assert vllm_source.parameters(f"{SCHEDULER}.{name}") == listed
    for function in (every_kind, only_keywords):
        listed = tuple(inspect.signature(function).parameters)
        assert vllm_source.parameter_names(function.__code__) == listed


def every_kind(a, /, b, *c, d, **e):
    """Takes every kind of parameter."""


def only_keywords(*, a, b=1):
    """Takes keywords only."""
