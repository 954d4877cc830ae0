"""The list of seeded faults, and a copy of a checkout to put them into."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

LIST = Path(__file__).with_name("faults.toml")
CPP = "csrc/cpu/"  # sources of the library for CPUs, which is built anew
LIBRARIES = "vllm_kvpolicy/*.so"  # built, and not tracked


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Args:
        name: room and what is wrong.
        old: text that it has exactly once.
        new: the text in its place.
        tests: words for pytest, a run each, the likeliest to find the fault first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Tells this fault from what it was before the list changed."""
        return sha256(repr(self).encode()).hexdigest()[:12]

    @property
    def is_cpp(self) -> bool:
        """Whether it shows only in a library that is built anew."""
        return self.file.startswith(CPP)

    def put_into(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: the text to replace is not there exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} is {count} times in {self.file}, expected "
                "once: bring tools/seeded_faults/faults.toml up to date"
            )
        return text.replace(self.old, self.new)


def read_faults(path: Path = LIST) -> list[Fault]:
    """Return the faults of a list."""
    rows = tomllib.loads(path.read_text())["fault"]
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]


@dataclass(frozen=True)
class Copy:
    """A copy of what a checkout tracks, with its environment and built library."""

    folder: Path

    @classmethod
    def of(cls, checkout: Path, folder: Path) -> "Copy":
        """Copy a checkout, uncommitted changes included, into an empty folder."""
        command = ["git", "ls-files", "-z"]
        listed = subprocess.run(command, cwd=checkout, capture_output=True, check=True)
        names = filter(None, listed.stdout.decode().split("\0"))
        built = (path.relative_to(checkout) for path in checkout.glob(LIBRARIES))
        for name in [*names, *built]:
            if (checkout / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, folder / name)
        if (checkout / ".venv").exists():
            (folder / ".venv").symlink_to((checkout / ".venv").resolve())
        return cls(folder)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes that run in it."""
        own = {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own}

    @contextmanager
    def seeded(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Have faults in the copy for a while; the library follows its sources."""
        touched = [self.folder / fault.file for fault in faults]
        if any(fault.is_cpp for fault in faults):
            touched += self.folder.glob(LIBRARIES)
        before = {path: path.read_bytes() for path in touched}
        try:
            for fault in faults:
                path = self.folder / fault.file
                _replace(path, fault.put_into(path.read_text()).encode())
            if any(fault.is_cpp for fault in faults):
                self._build()
            yield
        finally:
            for path, content in before.items():
                _replace(path, content)

    def _build(self) -> None:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        environment = {**self.environment, "KVPOLICY_CPU": "1", "KVPOLICY_CUDA": "0"}
        subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, check=True
        )


def _replace(path: Path, content: bytes) -> None:
    """Write a file anew; byte code of one that is as old and as long would stay."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
        stale.unlink()
