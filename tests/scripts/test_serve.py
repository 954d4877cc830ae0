"""`make serve`: the command line that it builds, and what it prints."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import serve  # noqa: E402


def command(*arguments, device="cpu"):
    return " ".join(serve.build_command(serve.parse(list(arguments)), device))


def test_the_default_is_the_packaged_model_with_a_policy():
    words = command()
    for part in (
        "serve reasoner/checkpoint",
        "--kv-policy ams-tova --kv-budget 512 --kv-interval 64",
        "--port 8000",
        "--served-model-name reasoner",
        "--max-model-len 4096",
        "--dtype float32",
        "--kv-cache-memory-bytes",
        "--enforce-eager",
    ):
        assert part in words, part


def test_variables_reach_the_command():
    words = command(
        *("--model", "some/model", "--port", "9", "--policy", "snapkv"),
        *("--budget", "256", "--interval", "32", "--", "--max-num-seqs", "4"),
    )
    for part in (
        "serve some/model",
        "--port 9",
        "--kv-policy snapkv --kv-budget 256 --kv-interval 32",
        "--served-model-name some/model",
    ):
        assert part in words, part
    assert words.endswith("--max-num-seqs 4")
    assert "--dtype" not in words


def test_without_a_policy_vllm_is_stock():
    assert "--kv-" not in command("--policy", "none").replace("--kv-cache", "")


def test_a_gpu_sizes_its_own_cache():
    words = command(device="cuda")
    assert "--kv-cache-memory-bytes" not in words
    assert "--enforce-eager" not in words


@pytest.mark.parametrize("prompt", ['say "hi"\nnow', "a=3;b=a"])
def test_the_example_prompt_is_valid_json(tmp_path, prompt):
    (tmp_path / "example_prompt.txt").write_text(prompt + "\n")
    text = serve.example_prompt(str(tmp_path))
    assert json.loads(f'"{text}"') == prompt


def test_a_port_in_use_is_refused_before_anything_starts(monkeypatch, capsys):
    with socket.socket() as other:
        # As vLLM listens where several API servers share a port.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(serve, "choose_lock", lambda: "cpu")
        monkeypatch.setattr(os, "execv", None)
        monkeypatch.setattr(sys, "argv", ["serve", "--port", str(port), "--model", "m"])
        assert serve.main() == 1
    answer = capsys.readouterr()
    assert answer.err.startswith(f"PORT: got {port} on 127.0.0.1, which cannot be")
    assert "set PORT= to a free one" in answer.err
    assert "Ready" not in answer.out


def test_a_free_port_passes():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    assert serve.check_port("127.0.0.1", port) is None


def test_make_passes_its_variables_on():
    answer = subprocess.run(
        ["make", "-n", "serve", "PORT=9", "POLICY=tova", "BUDGET=96", "MODEL=m"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    for part in ("--port 9", "--policy 'tova'", "--budget 96", "--model 'm'"):
        assert part in answer.stdout, answer.stdout + answer.stderr


def test_continuous_integration_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert "exec make test" in script.read_text()
