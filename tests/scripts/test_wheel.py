"""The wheel: what is in it, what it asks for, and that it asks for no vLLM."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_kvpolicy import compat

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md")
SOURCES += ("LICENSE", "NOTICE")
EXTRAS = {"cuda", "flashinfer", "xformers", "plot", "top", "bench", "dev"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel without compiled kernels, built of a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("vllm_kvpolicy", "csrc", "reasoner", "training"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", "dist"]
    environment = {**os.environ, "KVPOLICY_CPU": "0", "KVPOLICY_CUDA": "0"}
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = (folder / "dist").glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(path)


def text(wheel: zipfile.ZipFile, name: str) -> str:
    places = (each for each in wheel.namelist() if each.endswith(f"-info/{name}"))
    return wheel.read(*places).decode()


@pytest.fixture(scope="module")
def facts(wheel: zipfile.ZipFile) -> Message:
    return message_from_string(text(wheel, "METADATA"))


def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    folder = ROOT / "vllm_kvpolicy"
    package = [*folder.rglob("*.py"), *folder.rglob("*.html")]
    assert held == {path.relative_to(ROOT).as_posix() for path in package}
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in wheel.namelist()}
    assert sum(each.file_size for each in wheel.infolist()) < 4 * 2**20


def test_its_version_follows_vllm(facts: Message) -> None:
    assert facts["Name"] == "vllm-kvpolicy"
    assert re.fullmatch(re.escape(compat.TESTED_VLLM) + r"\.\d+", facts["Version"])
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == facts["Version"]


def test_it_asks_for_no_other_package(facts: Message) -> None:
    asked = facts.get_all("Requires-Dist")
    assert asked and all("; extra == " in each for each in asked)
    assert set(facts.get_all("Provides-Extra")) == EXTRAS
    releases = {each for each in asked if each.startswith("vllm")}
    assert releases == {f'vllm=={compat.TESTED_VLLM}.0; extra == "cuda"'}


def test_its_entry_points_are_there(wheel: zipfile.ZipFile) -> None:
    lines = [line for line in text(wheel, "entry_points.txt").splitlines() if line]
    assert lines == [
        "[console_scripts]",
        "vllm-kvpolicy = vllm_kvpolicy.__main__:main",
        "[vllm.general_plugins]",
        "kvpolicy = vllm_kvpolicy.plugin:register",
    ]


def test_it_runs_from_another_folder(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Unpacked alone: what it needs of the checkout would be missing."""
    wheel.extractall(tmp_path)
    code = (
        "import vllm_kvpolicy as p; from vllm_kvpolicy.__main__ import main;"
        "print(p.__file__); p.KVPolicyConfig('tova');"
        "raise SystemExit(main(['report']))"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path))
    assert "PyTorch for" in run.stdout and "C++ for" not in run.stdout


@pytest.mark.slow
def test_it_installs_beside_vllm_and_changes_no_other_package(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Into a new environment that has all packages of this one but ours."""
    packages = Path(find_spec("vllm").origin).parents[1]
    base, venv = tmp_path / "base", tmp_path / "venv"
    base.mkdir()
    for path in packages.iterdir():
        if not re.search(r"kvpolicy|^pip|^setuptools|^_distutils|\.pth$", path.name):
            (base / path.name).symlink_to(path)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (folder,) = venv.glob("lib/python*/site-packages")
    (folder / "base.pth").write_text(str(base))
    left_out = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {k: v for k, v in os.environ.items() if k not in left_out}

    def run(*words: str) -> str:
        command = [venv / "bin" / "python", "-m", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    before = set(run("pip", "freeze").splitlines())
    assert any(line.startswith("vllm==") for line in before)
    assert not any("kvpolicy" in line for line in before)
    run("pip", "install", "--no-index", str(wheel.filename))
    (new,) = set(run("pip", "freeze").splitlines()) ^ before
    assert new.startswith("vllm-kvpolicy @ ")
    assert "--kv-policy" in run("vllm.entrypoints.cli.main", "serve", "--help=all")
