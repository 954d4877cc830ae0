"""What `python -m vllm_kvpolicy.report` says, and the page from the same tables."""

import sys
from pathlib import Path

from vllm_kvpolicy import compat, report
from vllm_kvpolicy.guards import REFUSALS
from vllm_kvpolicy.policies.registry import names

ROOT = Path(__file__).resolve().parents[2]


def test_the_report_names_versions_platform_and_policies(capsys):
    status = report.main()
    text = capsys.readouterr().out
    for word in ("vllm-kvpolicy  0.1.0", "torch", "platform", "32 tokens", *names()):
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
