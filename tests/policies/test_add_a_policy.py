"""The examples of docs/add_a_policy.md, run as they stand there."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.event_inputs import TOKENS, make_inputs
from vllm_kvpolicy.api.engine_config import check_files
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies import admissions as admissions_folder
from vllm_kvpolicy.policies import build as factory
from vllm_kvpolicy.policies import scorers as scorers_folder
from vllm_kvpolicy.policies.admitted import MEMORY
from vllm_kvpolicy.policies.catalogue import admissions, scorers
from vllm_kvpolicy.policies.catalogue import names as registry

PAGE = Path(__file__).parents[2] / "docs" / "add_a_policy.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SCORER, OPTIONS, ROW, TEST, ADMISSION, STARTUP, ADMITTED_OPTIONS, ADMITTED_ROW = BLOCKS


def rows_of(module: Any, options: str, row: str) -> dict[str, Any]:
    """The row, evaluated where the page puts it."""
    names = dict(vars(module))
    exec(options, names)
    return eval("{" + row + "}", names)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files in their folders and the rows in their tables."""
    (tmp_path / "vnorm.py").write_text(SCORER)
    folder = tmp_path / "shortkeys"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "policy.py").write_text(ADMISSION)
    (folder / "startup.py").write_text(STARTUP)
    for package in (scorers_folder, admissions_folder):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    for name, row in rows_of(scorers, OPTIONS, ROW).items():
        monkeypatch.setitem(scorers.SCORERS, name, row)
    for name, row in rows_of(admissions, ADMITTED_OPTIONS, ADMITTED_ROW).items():
        monkeypatch.setitem(admissions.ADMISSIONS, name, row)
    yield
    for name in [name for name in sys.modules if re.search("vnorm|shortkeys", name)]:
        sys.modules.pop(name)


def test_one_file_and_one_row_make_policies(example: None) -> None:
    assert {"vnorm", "ams-vnorm", "adakv-vnorm"} <= set(registry.names())
    assert "vnorm" in registry.grammar()
    assert KVPolicyConfig("hard-vnorm", 128, 64).is_ragged
    assert factory.build("vnorm").needs.values
    with pytest.raises(ValueError, match="vnorm_power: got -1, expected a number >= 0"):
        factory.build("ams-vnorm", {"vnorm_power": -1})


def test_the_test_of_the_page_passes_and_can_fail(example: None) -> None:
    names: dict[str, Any] = {}
    exec(TEST, names)
    names["test_scores_are_the_squared_lengths_of_values"]()
    names["score"] = lambda *args, **options: torch.zeros(2, 50)
    with pytest.raises(AssertionError, match="not close"):
        names["test_scores_are_the_squared_lengths_of_values"]()


def test_one_folder_and_one_row_make_an_admission(example: None) -> None:
    assert registry.parse("shortkeys+ams-snapkv+quest").is_ragged({})
    policy = factory.build("shortkeys", {"shortkeys_limit": 2.0})
    inputs = make_inputs(policy.needs)
    unknown = {MEMORY: torch.zeros(inputs.must_keep.shape)}
    inputs = replace(inputs, memory=unknown, fresh_tokens=TOKENS)
    kept = policy.decide(inputs, budget=1).keep
    is_short = inputs.given("keys").norm(dim=-1) < 2.0
    assert torch.equal(kept, inputs.valid & (inputs.must_keep | is_short))


def test_an_admission_checks_itself_at_start(example: None) -> None:
    plain = SimpleNamespace(hf_text_config=SimpleNamespace(), model="m", revision=None)
    server = SimpleNamespace(model_config=plain)
    check_files(KVPolicyConfig("shortkeys", recent_tokens=16), server)
    with pytest.raises(ValueError, match="set --kv-recent 16 or more"):
        check_files(KVPolicyConfig("shortkeys", recent_tokens=15), server)
