"""`make serve`: the command line that it builds, and what it prints."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from support.make import make
from vllm_kvpolicy import compat

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import serve  # noqa: E402


def command(*arguments, device="cpu"):
    return " ".join(serve.build_command(serve.parse(list(arguments)), device))


def test_the_default_is_the_packaged_model_with_a_policy():
    words = command()
    for part in (
        "serve reasoner/checkpoint",
        "--kv-policy ams-expected --kv-budget 384 --kv-interval 128",
        "--port 8000",
        "--served-model-name reasoner",
        "--max-model-len 4096",
        "--dtype float32",
        "--kv-cache-memory-bytes",
        "--enforce-eager",
    ):
        assert part in words, part


@pytest.mark.parametrize(
    ("policy", "tokens"), [("ams-expected", 128), ("tova", 64), ("nope", 64)]
)
def test_the_interval_holds_the_window_of_the_policy(policy, tokens):
    assert f"--kv-interval {tokens}" in command("--policy", policy)
    assert "--kv-interval 256" in command("--policy", policy, "--interval", "256")


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


@pytest.mark.parametrize("is_emulated", [True, False])
@pytest.mark.parametrize(
    ("model", "device", "extra", "chosen"),
    [
        ("some/model", "cpu", [], ["--dtype", "float32"]),
        ("some/model", "cpu", ["--dtype=bfloat16"], []),
        ("some/model", "cpu", ["--dtype", "auto"], []),
        ("some/model", "cpu", ["--config", "mine.yaml"], []),  # may name a dtype
        ("some/model", "cuda", [], []),
        (serve.PACKAGED_MODEL, "cpu", [], []),  # is served in float32 anywhere
    ],
)
def test_emulated_bfloat16_gives_way_to_float32(
    model, device, extra, chosen, is_emulated, monkeypatch, capsys
):
    monkeypatch.setattr(compat, "multiplies_bfloat16", lambda: not is_emulated)
    options = serve.parse(["--model", model, "--", *extra])
    serve.choose_dtype(options, device)
    assert options.extra == extra + chosen * is_emulated
    said = capsys.readouterr().out
    assert said.startswith("in float32: this CPU") == bool(chosen and is_emulated)


def test_the_pretrained_model_is_fetched_and_keeps_its_short_name(monkeypatch):
    options = serve.parse(["--model", "smollm2"])
    made = subprocess.CompletedProcess([], 0, stdout="making it\n/cache/smollm2-135m\n")
    monkeypatch.setattr(serve.subprocess, "run", lambda *_, **__: made)
    options.model = serve.fetch_pretrained()
    words = " ".join(serve.build_command(options, "cpu"))
    assert "serve /cache/smollm2-135m " in words
    assert "--served-model-name smollm2 " in words


def test_a_pretrained_model_that_cannot_be_had_ends_the_start(monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr(serve.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(serve, "choose_lock", lambda: "cpu")
    monkeypatch.setattr(serve, "check_port", lambda host, port: None)
    monkeypatch.setattr(os, "execv", None)
    monkeypatch.setattr(sys, "argv", ["serve", "--model", "smollm2"])
    assert serve.main() == 1
    assert "MODEL: got 'smollm2', which cannot be fetched" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [[], ["--kv-live"], ["--kv_live"]])
def test_the_address_of_the_live_page_is_told_where_there_is_one(extra):
    root = "http://127.0.0.1:8000"
    told = serve.how_to_call(serve.parse(["--", *extra]), root)
    assert f"Ready: {root}/v1   model reasoner, policy ams-expected, budget 384" in told
    assert told.count(f"Live page: {root}/kv_policy/live\n") == len(extra)


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
        monkeypatch.setattr(sys, "argv", ["serve", "--port", str(port)])
        assert serve.main() == 1
    answer = capsys.readouterr()
    assert answer.err.startswith(f"PORT: got {port} on 127.0.0.1, which cannot be")
    assert "set PORT= to a free one" in answer.err
    assert "Ready" not in answer.out


@pytest.mark.parametrize("port", ["http", "65536", ""])
def test_what_is_no_port(port):
    with pytest.raises(ValueError, match=f"^PORT: got '{port}', expected a number"):
        serve.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "told"),
    [("no.such.host.invalid", "has no address"), ("192.0.2.1", "no address of this")],
)
def test_what_is_no_host_of_this_machine(host, told):
    with pytest.raises(ValueError, match=f"^HOST: got '{host}', which .*{told}"):
        serve.check_port(host, "18743")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("docs", "MODEL: got 'docs', a folder without config.json"),
        ("/no/such/folder", "MODEL: got '/no/such/folder', neither a folder nor"),
    ],
)
def test_a_bad_model_is_one_sentence(model, told, monkeypatch, capsys):
    monkeypatch.setattr(serve, "check_port", lambda host, port: None)
    monkeypatch.setattr(serve, "choose_lock", lambda: "cpu")
    monkeypatch.setattr(os, "execv", None)
    monkeypatch.setattr(sys, "argv", ["serve", "--model", model])
    assert serve.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(told, line), line


def test_models_that_are_there_pass(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.gguf"
    file.write_text("")
    for model in (serve.PACKAGED_MODEL, str(tmp_path), str(file)):
        assert serve.check_model(model, []) is None


def answers(reason):
    def ask(model, file):
        raise reason

    return ask


@pytest.mark.parametrize(
    ("model", "extra", "environment"),
    [
        ("s3://bucket/m", [], {}),
        ("some/GGUF:Q4_K_M", [], {}),
        ("some/model", ["--revision=v2"], {}),
        ("docs", ["--load_format", "runai_streamer"], {}),
        ("some/model", [], {"VLLM_USE_MODELSCOPE": "1"}),
    ],
)
def test_what_only_vllm_finds_is_not_asked_for(model, extra, environment, monkeypatch):
    never = AssertionError("the hub was asked")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", answers(never))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert serve.check_model(model, extra) is None


def test_a_hub_that_cannot_be_asked_is_a_warning(monkeypatch, capsys):
    away = huggingface_hub.errors.LocalEntryNotFoundError("no network")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", answers(away))
    assert serve.check_model("some/model", []) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("MODEL: 'some/model' is no folder, and the Hugging Face")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--budget", "2"], "BUDGET: got 2, expected at least 68 tokens"),
        (["--interval", "x"], "INTERVAL: got 'x', expected an integer"),
        (["--policy", "tva"], "POLICY: got 'tva', expected "),
        (["--", "--kv-budget", "x"], "ARGS: argument --kv-budget: .* got 'x'"),
    ],
)
def test_a_bad_policy_is_one_sentence_with_the_readers_name(words, told, capsys):
    with pytest.raises(ValueError, match=f"^{told}"):
        serve.check_policy(serve.parse(words), "cpu")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("--max-num-seqs 4  --dtype auto", ["--max-num-seqs", "4", "--dtype", "auto"]),
        (
            '--kv-policy-config {"a": "b c"} -x',
            ["--kv-policy-config", '{"a": "b c"}', "-x"],
        ),
        ('--a={"b": {"c": [1, "}"]}}', ['--a={"b": {"c": [1, "}"]}}']),
        ("--a {b} 'c d'", ["--a", "{b}", "c d"]),
        ('--a \'{"b": {"c d": "e"}}\'', ["--a", '{"b": {"c d": "e"}}']),
        (r'--a "{\"b\": {\"c d\": 1}}"', ["--a", '{"b": {"c d": 1}}']),
        ('{"b": "it\'s"} \'{"c": {"d": 1}}\'', ['{"b": "it\'s"}', '{"c": {"d": 1}}']),
        (r"""\' {"b": 1} \'""", ["'", '{"b": 1}', "'"]),
    ],
)
def test_words_keep_the_quotes_of_json(text, words):
    assert serve.split_words(text) == words


def test_make_leaves_the_quotes_of_json(tmp_path):
    """From the command line to scripts/serve.py; here a stand-in prints it."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\nprintf "%s" "$SERVE_ARGUMENTS"\n')
    python.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup_env.py").write_text("")
    given = '--kv-policy-config {"preset": "paper"}'
    answer = make(
        *("-f", ROOT / "Makefile", "serve", "PYTHON=true", f"ARGS={given}"),
        cwd=tmp_path,
    )
    assert answer.stdout == given, answer.stderr
    assert serve.split_words(given)[1] == '{"preset": "paper"}'


@pytest.mark.parametrize(
    ("programs", "called", "said"),
    [
        ({"chromium": "", "id": "echo 0"}, ["make"], ""),
        ({"id": "echo 0", "apt-get": ""}, ["apt-get", "apt-get", "make"], ""),
        ({"id": "echo 0", "apt-get": "exit 100"}, ["apt-get", "make"], "no Chromium"),
        ({"id": "echo 1000", "apt-get": ""}, ["make"], "no Chromium"),
    ],
    ids=["there", "installed", "fails", "no-root"],
)
def test_continuous_integration_gets_a_browser_and_runs_the_tests(
    programs, called, said, tmp_path
):
    """With stand-ins for all programs that the script calls."""
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    for name in ("dirname", "timeout"):
        (folder / name).symlink_to(shutil.which(name))
    for name, does in ({"make": ""} | programs).items():
        note = "" if name == "id" else f'echo "{name} $*" >> {log}\n'
        (folder / name).write_text(f"#!/bin/sh\n{note}{does}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [shutil.which("bash"), ROOT / ".ci" / "run"],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == called
    assert lines[-1] == "make test"
    assert all("chromium" in line or "update" in line for line in lines[:-1])
    assert done.stdout.startswith(said) and bool(said) == bool(done.stdout)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


@pytest.mark.parametrize(
    ("words", "cpus", "expected"),
    [
        ([], 2, None),
        (["--tensor-parallel-size", "2"], 2, "0|1"),
        (["-tp", "2"], 8, "0,1,2,3|4,5,6,7"),
        (["-tp=2", "--data-parallel-size=2"], 4, "0|1|2|3"),
        (["-dp", "3"], 8, "0,1|2,3|4,5"),
        (["-tp", "2", "--nnodes", "2"], 4, None),
        (["-tp", "4", "--nnodes", "2"], 4, "0,1|2,3"),
        (["-dp", "4", "-dpl", "2"], 4, "0,1|2,3"),
    ],
)
def test_ranks_on_a_cpu_have_threads_of_their_own(words, cpus, expected):
    assert serve.threads_of_ranks(words, list(range(cpus)), nodes=1) == expected


def test_vllm_places_ranks_where_there_are_numa_nodes():
    cores = list(range(8))
    assert serve.threads_of_ranks(["-tp", "2"], cores, nodes=2) is None
    assert serve.threads_of_ranks(["-tp", "4"], cores, nodes=2) == "0,1|2,3|4,5|6,7"
