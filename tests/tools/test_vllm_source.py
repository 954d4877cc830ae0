"""What a release of vLLM has is read from its source and compared with our rows."""

import ast
import inspect

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tools.vllm_surface import rows
from tools.vllm_surface.relied_on import ANY, Owner
from tools.vllm_surface.rows import Row, judge
from tools.vllm_surface.source import VllmSource
from vllm_kvpolicy import compat
from vllm_kvpolicy.api.patch_table import read_module

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
OUTPUT = "vllm.v1.outputs:AsyncModelRunnerOutput"
NEWEST = [*compat.RELEASES][-1]
INSTALLED = VllmSource(read_module)


def states(owner):
    """Return how the installed vLLM compares with the rows of an owner."""
    look = rows.look_into(INSTALLED)
    return [judge(row, look(row), "0.32.0").state for row in rows.rows((), (owner,))]


def test_a_change_is_found():
    owner = Owner(SCHEDULER, {"add_request": "self request x", "running": "self"})
    assert states(owner) == ["changed", "changed"]


@pytest.mark.parametrize(
    "owner",
    [
        Owner(SCHEDULER, {"nothing": "self"}),
        Owner(SCHEDULER, {"nothing": ANY}),
        Owner(SCHEDULER, read="nothing"),
        Owner("vllm.v1.core.sched.scheduler:Nothing", read="nothing"),
        Owner("vllm.v1.core.sched.nothing", read="nothing"),
    ],
)
def test_what_is_gone_is_found(owner):
    assert states(owner) == ["gone"]


def test_parameters_are_listed_as_inspect_lists_them():
    names = ("schedule", "add_request", "_preempt_request", "__init__", "_free_request")
    for name in names:
        listed = tuple(inspect.signature(vars(Scheduler)[name]).parameters)
        found = INSTALLED.signature(f"{SCHEDULER}.{name}")
        assert tuple(found.split()) == listed


SIGNATURES = (
    ("def f(): ...", "()"),
    ("def f(a, b=1, c: int = 2): ...", "a b c"),
    ("def f(a, *, b): ...", "a * b"),
    ("def f(a, /, b): ...", "a / b"),
    ("def f(a, b, /): ...", "a b /"),
    ("def f(a, *b, c, **d): ...", "a *b c **d"),
    ("def f(a, **b): ...", "a **b"),
    ("async def f(a): ...", "async a"),
    ("@property\ndef f(self): ...", "@property self"),
    ("@cached_property\ndef f(self): ...", "@cached_property self"),
    ("@staticmethod\ndef f(): ...", "@staticmethod"),
    ("@classmethod\n@override\nasync def f(cls, a): ...", "@classmethod async cls a"),
    ("@functools.lru_cache(maxsize=1)\ndef f(a): ...", "@lru_cache a"),
    ("@torch.inference_mode()\ndef f(a): ...", "a"),
)


@pytest.mark.parametrize(("text", "signature"), SIGNATURES)
def test_how_a_function_is_declared(text, signature):
    assert source_of(text).signature("vllm.a:f") == signature


def test_another_kind_of_parameter_or_binding_is_a_change():
    """No two of the declarations are taken for the same."""
    looks = [rows.look_into(source_of(text)) for text, _ in SIGNATURES]
    every = [look(Row(rows.READ, "vllm.a:f")) for look in looks]
    constant = rows.look_into(source_of("f = 1"))
    every.append(constant(Row(rows.READ, "vllm.a:f")))
    assert every[-1] == "" and len(set(every)) == len(every)
    for wanted in every:
        row = Row(rows.WRAPPED, "vllm.a:f", wanted)
        states = [judge(row, found, "0.32.0").state for found in every]
        assert states.count("same") == 1


def source_of(text):
    """Return a vLLM of one module."""
    code = ast.parse(text)
    return VllmSource(lambda module: code if module == "vllm.a" else None)


def test_what_a_class_leaves_to_its_subclasses_is_found():
    source = source_of(
        "class Base:\n"
        "    size: int = 1\n"
        "    @abstractmethod\n"
        "    def first(self): ...\n"
        "    def second(self): ...\n"
        "    @property\n"
        "    @abc.abstractmethod\n"
        "    def third(self): ...\n"
    )
    assert source.abstract_methods("vllm.a:Base") == ("first", "third")
    assert source.abstract_methods("vllm.a:Nothing") == ()


def test_what_a_class_inherits_abstract_is_found():
    texts = {
        "vllm.a": (
            "from vllm.b import Base as B\nclass C(B[int]):\n def first(self): ...\n"
        ),
        "vllm.b": (
            "from abc import ABC\nclass Base(ABC):\n"
            " @abstractmethod\n def first(self): ...\n"
            " @abstractmethod\n def second(self): ...\n"
        ),
    }
    trees = {name: ast.parse(text) for name, text in texts.items()}
    assert VllmSource(trees.get).abstract_methods("vllm.a:C") == ("second",)


@pytest.mark.parametrize("later", ["f = None", "del f"])
def test_what_is_bound_again_or_deleted_is_no_function(later):
    source = source_of(f"class A:\n def f(self): ...\n {later}\n")
    assert source.signature("vllm.a:A.f") is None
    assert source.defines("vllm.a:A.f") is (later == "f = None")


def test_what_only_others_are_given_is_not_defined():
    source = source_of(
        "class A:\n"
        " def f(self, scale: int):\n"
        "  other.sinks = 1\n"
        "  self.a, self.b = 1, 2\n"
        "  self.c: int = 3\n"
    )
    found = {
        name
        for name in ("scale", "sinks", "a", "b", "c")
        if source.defines(f"vllm.a:A.{name}")
    }
    assert found == {"a", "b", "c"}


def test_modules_and_names_are_found():
    source = source_of("from b import c\nclass D:\n    def e(self): self.f = 1\n")
    assert all(map(source.defines, ("vllm.a:c", "vllm.a:D.e", "vllm.a:D.f", "vllm:a")))
    assert not any(
        map(source.defines, ("vllm.a:b", "vllm.a:D.g", "vllm:b", "vllm.b:c"))
    )


@pytest.mark.parametrize(
    ("found", "version", "state", "is_known"),
    [
        ("get_output", "0.32.0", "same", True),
        ("get_output get_kv_connector_output", "0.33.1+cpu", "changed", True),
        ("get_output get_kv_connector_output", "0.32.9", "changed", False),
        ("get_output", "0.33.0", "same", True),
        ("get_output close", "0.33.0", "changed", False),
        (None, "0.33.0", "gone", False),
        # A release without a row is compared with the newest one that has one.
        (compat.RELEASES[NEWEST].changed[OUTPUT], "0.99.0", "changed", True),
    ],
)
def test_findings(found, version, state, is_known):
    row = Row(rows.ABSTRACT, OUTPUT, "get_output")
    finding = judge(row, found, version)
    assert (finding.state, finding.is_known) == (state, is_known)


def test_every_import_of_the_package_is_checked():
    targets = {row.target for row in rows.imports()}
    assert f"{SCHEDULER}" in targets and "vllm:EngineArgs" in targets
    look = rows.look_into(INSTALLED)
    assert [row for row in rows.imports() if look(row) is None] == []


def owner_in(tree, path):
    """Return a module or the class in it that defines the last name of a path."""
    for name in path.split(".")[:-1]:
        classes = (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef))
        tree = next(each for each in classes if each.name == name)
    return tree


def rename(owner, name):
    """Rename what defines a name; return (node, field) of each."""
    renamed = []
    for node in ast.walk(owner):
        is_self = isinstance(node, ast.Attribute) and (
            isinstance(node.value, ast.Name) and node.value.id == "self"
        )
        field = {
            ast.FunctionDef: "name",
            ast.AsyncFunctionDef: "name",
            ast.ClassDef: "name",
            ast.Name: "id",
            ast.alias: "asname" if getattr(node, "asname", None) else "name",
            ast.Attribute: "attr" if is_self else None,
        }.get(type(node))
        if field and getattr(node, field) == name:
            setattr(node, field, "renamed")
            renamed.append((node, field))
    return renamed


def test_what_is_renamed_is_gone():
    """Annotated parameters and attributes of others keep the name."""
    every = sorted([*rows.rows(), *rows.imports()], key=str)
    trees, still = {}, []
    for row in every:
        module, _, path = row.target.partition(":")
        tree = trees.setdefault(module, read_module(module))
        renamed = rename(owner_in(tree, path), path.split(".")[-1])
        source = VllmSource({module: tree}.get)
        if renamed and rows.look_into(source)(row) is not None:
            still.append(row.target)
        for node, field in renamed:
            setattr(node, field, path.split(".")[-1])
    assert len(every) > 200
    assert still == []
