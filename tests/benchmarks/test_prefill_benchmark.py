"""The benchmark of prompts under write gates, on the tiny model."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import prefill


def test_command(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    out = tmp_path / "prefill.json"
    words = f"prefill --model {tiny_model} --tokens 1024 --pairs 2 --out {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    prefill.main()
    record = json.loads(out.read_text())
    rows = record["rows"]
    assert 0 < record["threshold"] < 1
    for row in rows["wgkv"]:
        # Pages of 32 tokens are coarse beside 768 tokens.
        assert 0.15 < row["kept"] < 0.4
        assert 0 < row["event_seconds"] < row["seconds"]
    for row in rows["stock"] + rows["wgkv"]:
        assert 0 < row["attention_seconds"] < row["seconds"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("kept 0.") and len(rows["stock"]) == 2
    assert lines[-2].startswith("wgkv / stock, attention_seconds: ")
