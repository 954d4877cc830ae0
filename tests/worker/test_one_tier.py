"""The worker's main path knows interfaces only: no tier and no capture by name."""

import ast
from pathlib import Path

import pytest

import vllm_kvpolicy.worker

FOLDER = Path(vllm_kvpolicy.worker.__file__).parent
MAIN_PATH = ("runtime", "compaction", "warmup", "worker")
CHOICES = ("tiers", "captures")
INTERFACES = ("tiers.tier", "captures.capture")


def named(source: str) -> list[str]:
    """Return the tiers and captures that a source imports, less their interfaces."""
    prefix = f"{vllm_kvpolicy.worker.__name__}."
    modules = [
        node.module.removeprefix(prefix)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix)
    ]
    chosen = [each for each in modules if each.split(".")[0] in CHOICES]
    return [module for module in chosen if module not in INTERFACES]


@pytest.mark.parametrize("module", MAIN_PATH)
def test_no_tier_and_no_capture_is_named(module: str) -> None:
    assert named((FOLDER / f"{module}.py").read_text()) == []


def test_only_setup_chooses() -> None:
    found = named((FOLDER / "setup.py").read_text())
    assert {"tiers.equal", "tiers.ragged", "captures.token_signals"} < set(found)


@pytest.mark.parametrize("choice", ["tiers.ragged", "captures.visible_until"])
def test_a_module_that_names_one_is_found(choice: str) -> None:
    source = f"from vllm_kvpolicy.worker.{choice} import X"
    assert named(source) == [choice]
