"""What `vllm-kvpolicy report` says, and the page from the same tables."""

import re
import sys
from importlib import metadata
from pathlib import Path

from vllm_kvpolicy import __main__ as command
from vllm_kvpolicy import compat
from vllm_kvpolicy.api.guards import REFUSALS
from vllm_kvpolicy.commands import report
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import FLAG_KEYS
from vllm_kvpolicy.kernels import preferences
from vllm_kvpolicy.observe.metrics import SERIES

ROOT = Path(__file__).resolve().parents[2]
OURS = f"vllm-kvpolicy  {metadata.version('vllm-kvpolicy')}"
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def test_the_report_names_versions_platform_and_policies(capsys, monkeypatch):
    assert command.main(["report"]) == 0
    text, errors = capsys.readouterr()
    assert not errors
    for word in (OURS, "torch", "platform", "32 tokens", "snapkv"):
        assert word in text, word
    (kernels,) = (line for line in text.splitlines() if line.startswith("kernels "))
    assert kernels.split(maxsplit=1)[1] == preferences.summary("cpu")
    assert text.split("Refusals for this machine")[1].split()[1] == "none"
    monkeypatch.setattr(report, "main", lambda words: 1)
    assert command.main(["report"]) == 1


def test_the_report_fails_where_no_policy_can_run(capsys, monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.34.0")
    assert report.main([]) == 1
    assert (
        "other vLLM versions: install vLLM 0.32.x or 0.33.x" in capsys.readouterr().out
    )


def test_the_report_fails_where_kernels_are_demanded_that_are_not_there(
    capsys, monkeypatch
):
    monkeypatch.setattr(preferences, "demanded", lambda: "cuda")
    assert report.main([]) == 1
    refusals = capsys.readouterr().out.split("Refusals for this machine")[1]
    assert "KVPOLICY_KERNELS=cuda: needs an NVIDIA GPU" in refusals


def test_the_support_page_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import write_support

    text = write_support.render()
    assert (ROOT / "docs" / "support.md").read_text() == text, "run `make docs`"
    for row in REFUSALS:
        assert f"| {row.name} | {row.change} |" in text


def test_the_docs_name_every_flag_and_series():
    readme, flags, metrics = (
        (ROOT / name).read_text()
        for name in ("README.md", "docs/flags.md", "docs/metrics.md")
    )
    assert "`--kv-policy-config" in flags
    for entry in SERIES:
        assert f"`kvpolicy_{entry.name}" in metrics, entry.name
    for key in FLAG_KEYS:
        default = getattr(KVPolicyConfig, key.field)
        if default is None:
            assert f"`--kv-{key.key}`" in flags
        else:
            assert f"| `--kv-{key.key}` | {default} |" in readme


def test_the_readme_is_short_and_every_link_of_the_docs_leads_somewhere():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    pages = [ROOT / "README.md", ROOT / "docker" / "README.md"]
    reports = ROOT / "benchmarks" / "reports"
    links = [
        (page, target)
        for page in [*pages, *(ROOT / "docs").glob("*.md"), *reports.glob("*.md")]
        for target in LINK.findall(page.read_text())
    ]
    assert len(links) > 40
    for page, target in links:
        assert (page.parent / target).exists(), (page.name, target)
