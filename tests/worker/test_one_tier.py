"""The worker's main path knows interfaces only: no tier and no capture by name."""

import re
from pathlib import Path

import pytest

import vllm_kvpolicy.worker

FOLDER = Path(vllm_kvpolicy.worker.__file__).parent
CHOICE = re.compile(r"vllm_kvpolicy\.worker\.((?:tiers|captures)\.\w+)")
INTERFACES = {"tiers.tier", "captures.capture"}


def named(module: str) -> set[str]:
    """Return the tiers and captures that a module imports, less their interfaces."""
    return {*CHOICE.findall((FOLDER / f"{module}.py").read_text())} - INTERFACES


@pytest.mark.parametrize("module", ["runtime", "compaction", "warmup", "worker"])
def test_no_tier_and_no_capture_is_named(module: str) -> None:
    assert named(module) == set()


def test_only_setup_chooses() -> None:
    assert {"tiers.ragged", "captures.visible_until"} < named("setup")
