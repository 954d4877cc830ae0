"""Records the command, versions, commit and machine of a measurement."""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "vllm", "vllm-kvpolicy")
_ABSOLUTE = re.compile(r"""(?<![^\s='",\[{(])/[^\s'",\]})]*""")
"""An absolute path within a word: after a space, `=`, a quote, a comma or a bracket."""


def collect(module: str) -> dict[str, Any]:
    """Return command, versions, commit and machine.

    Args:
        module: module that was run, as for `python -m`.
    """
    changes = git("status", "--porcelain")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "command": shlex.join(["python", "-m", module, *map(redacted, sys.argv[1:])]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
        "git_commit": git("rev-parse", "HEAD"),
        "git_clean": None if changes is None else not changes,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "load_average_1min": load,
    }


def redacted(word: str) -> str:
    """Return a word of a command line with the last part of each absolute path."""
    option, equals, value = (
        word.rpartition("=") if word.startswith("-") else ("", "", word)
    )
    if value.startswith("/"):
        return option + equals + Path(value).name
    return _ABSOLUTE.sub(lambda found: Path(found[0]).name, word)


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """Return the output of a git command on the repository, None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, platform.processor())


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
