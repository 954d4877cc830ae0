"""The example of docs/add_a_policy.md, run as it stands there."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies import build as factory
from vllm_kvpolicy.policies import score
from vllm_kvpolicy.policies.catalogue import names as registry
from vllm_kvpolicy.policies.catalogue import words

PAGE = Path(__file__).parents[2] / "docs" / "add_a_policy.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file on the package's path and the row in the words."""
    import vllm_kvpolicy.policies as package

    code, row = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "vnorm.py").write_text(code)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    rows = eval("{" + row + "}", {"Word": words.Word})
    for name, word in rows.items():
        monkeypatch.setitem(words.SCORERS, name, word)
    yield
    sys.modules.pop("vllm_kvpolicy.policies.vnorm", None)


def test_one_file_and_one_row_make_policies(example: None) -> None:
    assert {"vnorm", "ams-vnorm", "adakv-vnorm"} <= set(registry.names())
    assert "vnorm" in registry.grammar()
    assert KVPolicyConfig("hard-vnorm", 128, 64).is_ragged
    assert factory.build("vnorm").needs.values


def test_the_example_scores_by_the_length_of_values(example: None) -> None:
    keys, values = torch.randn(2, 2, 50, 16)
    got = score("vnorm", keys, values, torch.zeros(4, 1, 16), torch.arange(50), 1e4)
    assert torch.equal(got, values.norm(dim=-1))
