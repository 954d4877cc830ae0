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


def source_of(text):
    """Return a vLLM of one module."""
    code = ast.parse(text)
    return VllmSource(lambda module: code if module == "vllm.a" else None)


def test_what_a_class_leaves_to_its_subclasses_is_found():
    source = source_of(
        "class Base:\n size: int = 1\n def second(self): ...\n"
        " @abstractmethod\n def first(self): ...\n"
        " @property\n @abc.abstractmethod\n def third(self): ...\n"
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


def test_what_only_others_are_given_is_not_defined():
    source = source_of(
        "class A:\n def f(self, scale: int):\n"
        "  other.sinks = 1\n  self.a, self.b = 1, 2\n  self.c: int = 3\n"
    )
    names = ("scale", "sinks", "a", "b", "c")
    found = [name for name in names if source.defines(f"vllm.a:A.{name}")]
    assert found == ["a", "b", "c"]


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
