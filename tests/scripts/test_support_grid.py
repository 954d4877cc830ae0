"""The grid of docs/support.md: what it calls refused, tested and of a kind is so."""

import re
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.check.engines import served_names
from support.engine_configs import Overlay
from support.sweeps import evictions
from vllm_kvpolicy.policies.names import ADMISSIONS, SELECTIONS, parse

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import support_grid  # noqa: E402
from support_grid import EXAMPLES, FEATURES, KINDS, Feature  # noqa: E402

COLUMNS = {feature.name: feature for feature in FEATURES}
RAN = [(feature, kind) for feature in FEATURES for kind in feature.ran]
EVICTIONS = evictions()


def ran_by(path: str) -> list[str]:
    """Return the policies that a file of the repository names, or makes a list of."""
    if path == support_grid.GPU:  # which names others to leave them out
        return [name for tier in (True, False) for name in served_names(ragged=tier)]
    text = (ROOT / path).read_text()
    found = EVICTIONS if "evictions()" in text else []
    for word in {*re.findall(r"[\w+-]+", text)}:
        with suppress(ValueError):
            found = [*found, parse(word).name]
    return [name for name in found if not parse(name).is_test]


@pytest.mark.parametrize(
    ("feature", "kind"), RAN, ids=lambda value: getattr(value, "name", value)
)
def test_what_is_called_tested_is_run_by_a_file(feature: Feature, kind: str) -> None:
    path = feature.ran[kind]
    assert feature.word in (ROOT / path).read_text()
    assert kind in {support_grid.kind_of(name) for name in ran_by(path)}


@pytest.mark.parametrize("kind", KINDS)
def test_real_configurations_are_refused_alike(policy_config: Any, kind: str) -> None:
    """The guards see in the stand-in what they see in a VllmConfig of vLLM."""
    policy = {"additional_config": {"kv_policy": EXAMPLES[kind]}}
    for feature in FEATURES:
        server = support_grid.server_with(EXAMPLES[kind], feature.changes)
        real = Overlay(policy_config, {**policy, **feature.changes})
        assert support_grid.refused(server) == support_grid.refused(real), feature.name
    assert support_grid.refused(support_grid.plain_server(EXAMPLES[kind])) == []


def test_kinds_of_models_name_a_test_or_a_refusal() -> None:
    text = (ROOT / "scripts" / "recipes.toml").read_text()
    every: list[str] = []
    for kind in tomllib.loads(text)["kind"]:
        rows = [row.name for row in support_grid.REFUSALS]
        assert (ROOT / kind["test"]).exists() if "test" in kind else kind["row"] in rows
        every += kind["models"].split()
    assert len(every) == len(set(every)) > 100


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
    assert support_grid.cell(support_grid.EQUAL, graphs) == "GPU, once"
    kept = [row for row in support_grid.REFUSALS if not row.name.startswith("LoRA")]
    monkeypatch.setattr(support_grid, "REFUSALS", kept)
    assert support_grid.cell(support_grid.FITTED, lora) == "untested"
