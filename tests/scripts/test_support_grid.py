"""The grid of docs/support.md: what it calls refused, tested and of a kind is so."""

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.check.engines import served_names
from support.engine_configs import Overlay
from support.sweeps import covering, evictions
from vllm_kvpolicy.policies.names import ADMISSIONS, SELECTIONS, parse

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import support_grid  # noqa: E402
from support_grid import EXAMPLES, FEATURES, KINDS, Feature  # noqa: E402

COLUMNS = {feature.name: feature for feature in FEATURES}
RAN = [(feature, kind) for feature in FEATURES for kind in feature.ran]
EVICTIONS = evictions()


def policies_in(source: str) -> set[str]:
    """Return the policies that code names, and those of lists that it makes of all."""
    tree = ast.parse(source)
    found = {name for names_ in lists_used(tree).values() for name in names_}
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in said:  # a docstring
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for word in node.value.split():
                try:
                    is_test = parse(word).is_test
                except ValueError:
                    continue
                found |= set() if is_test else {word}
    return found


def lists_used(tree: ast.Module) -> dict[str, list[str]]:
    """Return the lists made of `evictions()` that a file's functions read."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    reads = {
        node.id
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name)
    }
    known = {"covering": covering, "evictions": evictions, "parse": parse}
    made: dict[str, Any] = dict(known)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            code = ast.unparse(node.value)
            if any(
                re.search(rf"\b{word}\b", code)
                for word in {*made} - {"covering", "parse"}
            ):
                made[node.targets[0].id] = eval(code, made)
    return {name: made[name] for name in made if name in reads - known.keys()}


def ran_by(path: str) -> set[str]:
    """Return the policies that a file of the repository runs."""
    if path == support_grid.GPU:  # which names others to leave them out
        return {name for tier in (True, False) for name in served_names(ragged=tier)}
    return policies_in((ROOT / path).read_text())


def test_lists_of_names_count_as_what_they_hold_where_they_are_used() -> None:
    made = "A = [n for n in evictions() if not parse(n).is_ragged({})]\n"
    assert policies_in(made + "def f():\n    'snapkv'\n    evictions()") == set()
    found = policies_in(made + "@run(A)\ndef f():\n    pass")
    kinds = {support_grid.kind_of(name) for name in found if not parse(name).is_test}
    assert kinds == {support_grid.EQUAL, support_grid.FITTED}


@pytest.mark.parametrize(
    ("feature", "kind"), RAN, ids=lambda value: getattr(value, "name", value)
)
def test_what_is_called_tested_is_run_by_a_file(feature: Feature, kind: str) -> None:
    path = feature.ran[kind]
    assert feature.word in (ROOT / path).read_text()
    ran = [name for name in ran_by(path) if not parse(name).is_test]
    assert kind in {support_grid.kind_of(name) for name in ran}


@pytest.mark.parametrize("kind", KINDS)
def test_real_configurations_are_refused_alike(policy_config: Any, kind: str) -> None:
    """The guards see in the stand-in what they see in a VllmConfig of vLLM."""
    policy = {"additional_config": {"kv_policy": EXAMPLES[kind]}}
    for feature in FEATURES:
        server = support_grid.server_with(EXAMPLES[kind], feature.changes)
        real = Overlay(policy_config, {**policy, **feature.changes})
        assert support_grid.refused(server) == support_grid.refused(real), feature.name
    assert support_grid.refused(support_grid.plain_server(EXAMPLES[kind])) == []


def test_every_policy_has_a_kind_and_every_kind_a_policy() -> None:
    every = [*EVICTIONS, *ADMISSIONS, *SELECTIONS, "wgkv+tova", "tova+quest"]
    assert {support_grid.kind_of(name) for name in every} == set(KINDS)
    for kind, policy in EXAMPLES.items():
        assert support_grid.kind_of(str(policy["policy"])) == kind
    assert support_grid.kind_of("local") == support_grid.OWN


def test_cells_follow_the_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    lora, graphs = COLUMNS["LoRA"], COLUMNS["CUDA graphs"]
    found = [support_grid.cell(kind, lora) for kind in KINDS]
    assert found == ["tested", "untested", "refused", "refused", "untested"]
    assert support_grid.cell(support_grid.EQUAL, graphs) == "H100, once"
    kept = [row for row in support_grid.REFUSALS if not row.name.startswith("LoRA")]
    monkeypatch.setattr(support_grid, "REFUSALS", kept)
    assert support_grid.cell(support_grid.FITTED, lora) == "untested"
