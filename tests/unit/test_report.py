"""What `python -m vllm_kvpolicy.api.report` says, and the page from the same tables."""

import sys
from pathlib import Path

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import report
from vllm_kvpolicy.api.guards import REFUSALS
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import FLAG_KEYS
from vllm_kvpolicy.metrics import SERIES
from vllm_kvpolicy.policies.catalogue.admissions import ADMISSIONS
from vllm_kvpolicy.policies.catalogue.allocators import ALLOCATORS
from vllm_kvpolicy.policies.catalogue.scorers import SCORERS
from vllm_kvpolicy.policies.catalogue.selections import SELECTIONS

ROOT = Path(__file__).resolve().parents[2]


def test_the_report_names_versions_platform_and_policies(capsys):
    status = report.main()
    text = capsys.readouterr().out
    for word in ("vllm-kvpolicy  0.1.0", "torch", "platform", "32 tokens", "snapkv"):
        assert word in text, word
    assert text.split("Refusals for this machine")[1].split()[1] == "none"
    assert status == 0


def test_the_report_fails_where_no_policy_can_run(capsys, monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.33.0")
    assert report.main() == 1
    assert "other vLLM versions: install vLLM 0.32.x" in capsys.readouterr().out


def test_the_support_page_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import write_support

    text = write_support.render()
    assert (ROOT / "docs" / "support.md").read_text() == text, "run `make docs`"
    for row in REFUSALS:
        assert f"| {row.name} | {row.change} |" in text


def test_the_readme_names_every_policy_flag_and_series():
    text = (ROOT / "README.md").read_text()
    words = [*filter(None, ALLOCATORS), *SCORERS, *ADMISSIONS, *SELECTIONS]
    flags = [f"--kv-{key.key}" for key in FLAG_KEYS]
    series = [f"kvpolicy_{entry.name}" for entry in SERIES]
    for word in (*words, *flags, "--kv-policy-config", *series):
        assert f"`{word}" in text, word
    for key in FLAG_KEYS:
        default = getattr(KVPolicyConfig, key.field)
        assert f"| `--kv-{key.key}` | {default} |" in text
