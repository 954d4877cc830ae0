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

from support.make import make
from vllm_kvpolicy import compat
from vllm_kvpolicy.__main__ import COMMANDS
from vllm_kvpolicy.api.cli import ARGUMENTS
from vllm_kvpolicy.policies.names import ADMISSIONS, ALLOCATORS, SCORERS, SELECTIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md")
SOURCES += ("LICENSE", "NOTICE")
ROOMS = ("tests", "benchmarks", "training", "vllm_kvpolicy")
EXTRAS = {"cuda", "flashinfer", "xformers", "plot", "bench", "dev"}


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


def test_the_changes_count_what_there_is() -> None:
    """Without the controls, which nobody serves with."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    scorers, allocators = {*SCORERS} - {"random"}, {*ALLOCATORS} - {"", "strat"}
    assert f" {len(scorers)} scorers, {len(allocators)} allocators," in changes
    assert f"`--kv-policy NAME` and {len(ARGUMENTS) - 1} more flags" in changes
    for word in (*ADMISSIONS, *SELECTIONS, *COMMANDS):
        assert f"`{word}`" in changes, word


def test_it_asks_for_no_other_package(facts: Message) -> None:
    asked = facts.get_all("Requires-Dist")
    assert asked and all("; extra == " in each for each in asked)
    assert set(facts.get_all("Provides-Extra")) == EXTRAS
    releases = {each for each in asked if each.startswith("vllm")}
    assert releases == {f'vllm=={compat.TESTED_VLLM}.0; extra == "cuda"'}


def test_the_extra_dev_is_what_the_tests_import(facts: Message) -> None:
    """Beside what vLLM brings: requirements/cpu.txt."""
    asked = {re.match(r"[\w-]+", each)[0] for each in of_extra(facts, "dev")}
    pinned = {line.partition("==")[0] for line in pins("dev")}
    assert asked <= pinned
    modules = imported()
    used = {name for name in pinned if name.replace("-", "_") in modules}
    # Plugins of pytest, a theme and a kernel are named, not imported.
    named = {"pytest-xdist", "pytest-timeout", "mkdocs-material", "ipykernel", "ruff"}
    assert (used | named) - asked == set()


def of_extra(facts: Message, extra: str) -> list[str]:
    """Return the requirements of an extra."""
    asked = facts.get_all("Requires-Dist")
    return [each for each in asked if each.endswith(f'extra == "{extra}"')]


def pins(lock: str) -> list[str]:
    """Return the pinned packages of a lock."""
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    return [line for line in lines if "==" in line]


def imported() -> set[str]:
    """Return the modules that tests, benchmarks and the package import, by head."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    pattern = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)
    return {name for path in files for name in pattern.findall(path.read_text())}


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
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import vllm_kvpolicy as p; print(p.__file__); p.KVPolicyConfig('tova')"
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip().startswith(str(tmp_path)), run.stderr
    run = subprocess.run(
        [sys.executable, "-m", "vllm_kvpolicy", "report"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "PyTorch for" in run.stdout and "C++ for" not in run.stdout


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


def test_make_builds_it() -> None:
    answer = make("-n", "wheel")
    assert "pip wheel . " in answer.stdout and "rm -rf build dist" in answer.stdout
