"""What a release of vLLM has changed is found, unless its row says how."""

import ast
import inspect
import sys

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import version_check, vllm_source
from vllm_kvpolicy.api.patch_table import Patch
from vllm_kvpolicy.api.relied_on import ANY, Owner
from vllm_kvpolicy.api.version_check import Row, judge
from vllm_kvpolicy.api.vllm_source import VllmSource

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
OUTPUT = "vllm.v1.outputs:AsyncModelRunnerOutput"
NEWEST = [*compat.RELEASES][-1]


def test_the_tables_hold_against_this_vllm():
    assert version_check.problems(None) == []


def test_a_changed_signature_is_found():
    patch = Patch("vllm.engine.arg_utils:EngineArgs.add_cli_args", "x", "", "")
    owner = Owner(SCHEDULER, {"add_request": "self request x"})
    problems = version_check.problems(None, (patch,), (owner,))
    told = "EngineArgs.add_cli_args is declared with @staticmethod, parser, expected x"
    assert told in problems[0]
    told = f"{SCHEDULER}.add_request is declared with self, request, expected self, "
    assert told in problems[1]
    assert all("install vLLM 0.32.x" in problem for problem in problems)


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
    (problem,) = version_check.problems(None, (), (owner,))
    assert problem == f"vLLM has no {owner.path('nothing')}: install vLLM 0.32.x"


def test_an_attribute_in_place_of_a_method_is_found():
    owner = Owner(SCHEDULER, {"running": "self"})
    (problem,) = version_check.problems(None, (), (owner,))
    assert f"{SCHEDULER}.running is declared with nothing, expected self" in problem


def test_rows_of_other_platforms_are_left_out():
    owner = Owner(SCHEDULER, read="nothing", platform="cuda")
    counts = {
        platform: len(version_check.problems(platform, (), (owner,)))
        for platform in ("cpu", "cuda", None)
    }
    assert counts == {"cpu": 0, "cuda": 1, None: 1}


def test_the_check_imports_nothing():
    vllm_source.installed.cache_clear()
    before = set(sys.modules)
    assert version_check.problems(None) == []
    assert set(sys.modules) == before


def test_parameters_are_listed_as_inspect_lists_them():
    names = ("schedule", "add_request", "_preempt_request", "__init__", "_free_request")
    for name in names:
        listed = tuple(inspect.signature(vars(Scheduler)[name]).parameters)
        found = vllm_source.installed().signature(f"{SCHEDULER}.{name}")
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
    looks = [version_check.look_into(source_of(text)) for text, _ in SIGNATURES]
    every = [look(Row(version_check.READ, "vllm.a:f")) for look in looks]
    constant = version_check.look_into(source_of("f = 1"))
    every.append(constant(Row(version_check.READ, "vllm.a:f")))
    assert every[-1] == "" and len(set(every)) == len(every)
    for wanted in every:
        row = Row(version_check.WRAPPED, "vllm.a:f", wanted)
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
    row = Row(version_check.ABSTRACT, OUTPUT, "get_output")
    finding = judge(row, found, version)
    assert (finding.state, finding.is_known) == (state, is_known)


def test_a_start_knows_the_row_of_its_release(monkeypatch):
    owner = Owner(SCHEDULER, {"add_request": "self request x"})
    told = compat.Release("", {f"{SCHEDULER}.add_request": "self request"})
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.34.0")
    assert len(version_check.problems(None, (), (owner,))) == 1
    monkeypatch.setitem(compat.RELEASES, "0.34", told)
    assert version_check.problems(None, (), (owner,)) == []


def test_a_new_abstract_method_is_refused_in_words():
    row = Row(version_check.ABSTRACT, OUTPUT, "get_output")
    assert judge(row, "get_output close", "0.32.0").sentence() == (
        f"{OUTPUT} leaves to subclasses get_output, close, expected get_output: "
        "install vLLM 0.32.x"
    )


def test_every_import_of_the_package_is_checked():
    targets = {row.target for row in version_check.imports()}
    assert f"{SCHEDULER}" in targets and "vllm:LLM" in targets
    look = version_check.look_into(vllm_source.installed())
    assert [row for row in version_check.imports() if look(row) is None] == []


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
    rows = sorted([*version_check.rows(), *version_check.imports()], key=str)
    load, trees, still = vllm_source.installed()._module, {}, []
    for row in rows:
        module, _, path = row.target.partition(":")
        tree = trees.setdefault(module, load(module))
        renamed = rename(owner_in(tree, path), path.split(".")[-1])
        source = VllmSource({module: tree}.get)
        if renamed and version_check.look_into(source)(row) is not None:
            still.append(row.target)
        for node, field in renamed:
            setattr(node, field, path.split(".")[-1])
    assert len(rows) > 200
    assert still == []
