"""`make serve`: the command line that it builds, and what it prints."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from support.make import make
from vllm_kvpolicy import compat
from vllm_kvpolicy.policies.admissions import wgkv
from vllm_kvpolicy.policies.admissions.dms import model as dms_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import serve  # noqa: E402


def command(*arguments, device="cpu"):
    options = serve.parse(list(arguments))
    serve.choose_budget(options)
    return " ".join(serve.build_command(options, device))


@pytest.mark.parametrize(
    ("arguments", "is_auto"),
    [
        (["--policy", "ams-tova", "--", "--kv-live"], True),
        (["--policy", "ams-tova", "--", "--kv_events", "always"], False),
        (["--policy", "ams-tova", "--", '--kv-policy-config={"hints": true}'], True),
        (
            ["--policy", "hard-tova", "--", '--kv-policy-config={"preset": "paper"}'],
            False,
        ),
        (["--policy", "ams-tova", "--", "--kv-budget=512"], False),
        (["--policy", "ams-tova", "--", "--kv-recent=x"], False),  # refused later
        (["--policy", "ams-tova", "--", "--additional-config={}"], False),
        (["--policy", "rpc"], True),
        (["--policy", "quest"], False),  # keeps all
        (["--budget", "384"], False),
    ],
)
def test_the_pool_decides_about_the_budget_unless_something_else_is_said(
    arguments, is_auto
):
    assert ("--kv-budget auto" in command(*arguments)) == is_auto
    assert ("--kv-budget 384" in command(*arguments)) == ("384" in arguments)


@pytest.mark.parametrize(
    ("arguments", "gates"),
    [
        (["--policy", "wgkv"], "reasoner/gates/wgkv"),
        (["--policy", "wgkv+snapkv"], "reasoner/gates/wgkv"),
        (["--policy", "wgkv", "--model", "smollm2"], "training/gates/smollm2-wgkv"),
        (["--policy", "wgkv", "--model", "another"], ""),
        (["--policy", "wgkv", "--", "--kv-policy-config={}"], ""),
        (["--policy", "ams-tova"], ""),
    ],
)
def test_models_of_the_checkout_have_gates_of_their_own(arguments, gates):
    options = serve.parse(arguments)
    serve.choose_gates(options)
    extra = " ".join(options.extra)
    assert (gates in extra) if gates else "gates" not in extra
    assert ("--kv-recent 64" in extra) == gates.startswith("training")


LOADERS = {"wgkv_gates": wgkv.load, "dms_adapter": dms_model.load}


@pytest.mark.parametrize(("name", "policy"), serve.GATES)
def test_gates_of_the_checkout_are_there(name, policy):
    key, path, window = serve.GATES[name, policy]
    assert LOADERS[key](ROOT / path).window == window
    model = serve.PACKAGED_MODEL if name == serve.PACKAGED_NAME else name
    options = serve.parse(["--policy", policy, "--model", model])
    serve.choose_gates(options)
    serve.check_policy(options, "cpu")


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


def test_variables_reach_the_command():
    words = command(
        *("--model", "some/model", "--port", "9", "--policy", "snapkv"),
        *("--budget", "256", "--interval", "32", "--", "--max-num-seqs", "4"),
    )
    assert "serve some/model " in words and "--served-model-name some/model" in words
    assert "--kv-policy snapkv --kv-budget 256 --kv-interval 32" in words
    assert "--port 9" in words and words.endswith("--max-num-seqs 4")
    # vLLM warns of a flag that comes twice.
    pools = command(), command("--", "--kv_cache_memory_bytes", "6")
    assert [words.count("memory") for words in pools] == [1, 1]
    # An interval that was left out holds the window of the policy.
    assert "--kv-interval 64" in command("--policy", "tova")


def test_the_pretrained_model_is_fetched_and_keeps_its_short_name(monkeypatch):
    options = serve.parse(["--model", "smollm2"])
    made = subprocess.CompletedProcess([], 0, stdout="making it\n/cache/smollm2-135m\n")
    monkeypatch.setattr(serve.subprocess, "run", lambda *_, **__: made)
    options.model = serve.fetch_pretrained()
    words = " ".join(serve.build_command(options, "cpu"))
    assert "serve /cache/smollm2-135m " in words
    assert "--served-model-name smollm2 " in words


@pytest.mark.parametrize(
    ("page", "budget", "said"),
    [
        ('kvpolicy_floor_tokens{engine="0"} 448.0\n', "auto", "budget auto (448)"),
        ('kvpolicy_floor_tokens{engine="0"} 448.0\n', "448", "budget 448\n"),
        ("vllm:requests 1\n", "auto", "budget auto\n"),
    ],
)
def test_it_says_what_auto_has_come_to(page, budget, said, monkeypatch):
    options = serve.parse(["--policy", "tova", "--budget", budget])
    monkeypatch.setattr(
        serve.urllib.request, "urlopen", lambda url, timeout: BytesIO(page.encode())
    )
    floor = serve.chosen_floor("http://here")
    assert said in serve.how_to_call(options, "http://here", floor)


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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--budget", "2"], "BUDGET: got 2, expected at least 68 tokens"),
        (["--interval", "x"], "INTERVAL: got 'x', expected an integer"),
        (
            ["--policy", "tva"],
            r"POLICY: got 'tva' \(did you mean 'tova'\?\), expected ",
        ),
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
        ('--json {"a": "b c"} -x', ["--json", '{"a": "b c"}', "-x"]),
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
    words = ("-f", ROOT / "Makefile", "serve", "PYTHON=true", f"ARGS={given}")
    answer = make(*words, cwd=tmp_path)
    assert answer.stdout == given, answer.stderr
    assert serve.split_words(given)[1] == '{"preset": "paper"}'


@pytest.mark.parametrize(
    ("words", "cpus", "nodes", "expected"),
    [
        ([], 2, 1, None),
        (["--tensor-parallel-size", "2"], 2, 1, "0|1"),
        (["-tp", "2"], 8, 1, "0,1,2,3|4,5,6,7"),
        (["-tp=2", "--data-parallel-size=2"], 4, 1, "0|1|2|3"),
        (["-dp", "3"], 8, 1, "0,1|2,3|4,5"),
        (["-tp", "2", "--nnodes", "2"], 4, 1, None),
        (["-tp", "4", "--nnodes", "2"], 4, 1, "0,1|2,3"),
        (["-dp", "4", "-dpl", "2"], 4, 1, "0,1|2,3"),
        # vLLM places ranks on NUMA nodes, where each rank has one.
        (["-tp", "2"], 8, 2, None),
        (["-tp", "4"], 8, 2, "0,1|2,3|4,5|6,7"),
    ],
)
def test_ranks_on_a_cpu_have_threads_of_their_own(words, cpus, nodes, expected):
    assert serve.threads_of_ranks(words, list(range(cpus)), nodes) == expected


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        (["python", None], None, None),
        (["python", "VLLM::EngineCor"], None, "nobind"),  # as the kernel cuts it off
        (["VLLM::Worker"], "0-1", "0-1"),
    ],
)
def test_beside_another_vllm_no_server_is_bound(names, given, expected, monkeypatch):
    processes = [SimpleNamespace(info={"name": name}) for name in names]
    monkeypatch.setattr(psutil, "process_iter", lambda fields: processes)
    environment = {} if given is None else {serve.THREADS: given}
    monkeypatch.setattr(os, "environ", environment)
    serve.choose_threads(serve.parse([]))
    assert environment.get(serve.THREADS) == expected


@pytest.mark.parametrize(
    ("words", "is_added"),
    [
        ([], True),
        (["--", "--kv_live"], False),
        (["--", "--additional-config", "{}"], False),
        (["--", "--kv-policy-config", '{"live": true, "live_text": true}'], False),
        (["--", "--kv-policy-config", '{"hints": true}'], True),
        (["--policy", "none"], False),
    ],
)
def test_a_policy_is_served_with_its_live_page(words, is_added, monkeypatch):
    monkeypatch.delenv("VLLM_KV_LIVE", raising=False)
    options = serve.parse(words)
    before = len(options.extra)
    serve.choose_page(options)
    assert options.extra[before:] == ["--kv-live"] * is_added
    monkeypatch.setenv("VLLM_KV_LIVE", "0")
    silent = serve.parse(words)
    serve.choose_page(silent)
    assert len(silent.extra) == before
    page = "Live page: http://here/kv_policy/live"
    has_page = is_added or "--kv_live" in words
    assert (page in serve.how_to_call(options, "http://here")) == has_page


def test_the_log_has_errors_and_what_the_policy_says(monkeypatch, capsys):
    """Unless a variable of the environment has chosen what vLLM tells."""
    for name in serve.LOGGING:
        monkeypatch.delenv(name, raising=False)
    options = serve.parse([])
    serve.choose_log(options)
    assert options.extra == ["--uvicorn-log-level", "warning"]
    path = os.environ["VLLM_LOGGING_CONFIG_PATH"]
    script = (
        "import logging.config, json\n"
        f"logging.config.dictConfig(json.load(open({path!r})))\n"
        "for name in ('vllm.model', 'vllm.kv_policy'):\n"
        "    for level in ('info', 'warning', 'error'):\n"
        "        getattr(logging.getLogger(name), level)(f'{name} {level}')\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert said.stdout.splitlines() == [
        "ERROR vllm.model error",
        *(
            f"{level.upper()} vllm.kv_policy {level}"
            for level in ("info", "warning", "error")
        ),
    ]
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH")
    for level, more in (("INFO", []), (None, ["--logging_config.log_level=DEBUG"])):
        if level:
            monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
        else:
            monkeypatch.delenv("VLLM_LOGGING_LEVEL")
        options = serve.parse(["--", *more])
        capsys.readouterr()
        serve.choose_log(options)
        assert options.extra == more and not capsys.readouterr().out
        assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ


def test_only_a_server_of_our_own_is_ready() -> None:
    """Another one that listens on the port would have its address printed as ours."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert serve.listens(os.getpid(), port)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as other:
            assert not serve.listens(other.pid, port)
            other.communicate(b"\n")
    assert not serve.listens(os.getpid(), port)
    assert not serve.listens(other.pid, port)  # which has ended


HANGS = """
import os, signal, sys, time
from types import SimpleNamespace
import serve
serve.GRACE_SECONDS = 0.5
server = os.getpid()
if not os.fork():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = SimpleNamespace(host="127.0.0.1", port="9", extra=[])
    serve.listens = lambda *given: print("attended", flush=True) or is_left
    serve.urllib.request.urlopen = lambda *given, **more: None
    serve.how_to_call = serve.chosen_floor = lambda *given: "it answers"
    serve.attend(options, server)
    os._exit(0)
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(60 if waits else 1)
"""


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_server_that_waits_for_its_clients_is_ended(is_interrupted: bool) -> None:
    """Interrupted with its group, or told alone: then it listens no more."""
    code = f"waits, is_left = True, {not is_interrupted}{HANGS}"
    command, folder = [sys.executable, "-c", code], Path(serve.__file__).parent
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as server:
        assert server.stdout is not None and "attended" in server.stdout.readline()
        if is_interrupted:
            os.killpg(server.pid, signal.SIGINT)
        told = "vLLM stopped 0.5 s ago and waits for its clients: server killed"
        assert told in server.stdout.read()
    assert server.returncode == -signal.SIGKILL


def test_a_server_that_cannot_start_is_said_to_have_ended() -> None:
    """What vLLM prints last does not say why."""
    command = [sys.executable, "-c", f"waits = is_left = False{HANGS}"]
    folder = Path(serve.__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert "had not answered on port 9; if nobody stopped it" in done.stderr
