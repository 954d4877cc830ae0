"""Runs the peer's worker as a process: one JSON line in, one out."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT


class PeerError(Exception):
    """The peer is not installed, or its worker has died."""


class Worker:
    """A running worker; as a context manager it ends with the block.

    Args:
        settings: `model`, `dtype`, `threads`; see `worker`.

    Raises:
        PeerError: it does not start.
    """

    def __init__(self, command: Sequence[str], settings: dict[str, Any]) -> None:
        threads = {"OMP_NUM_THREADS": str(settings["threads"])}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **threads},
        )
        self.versions = self.ask(settings)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one line.

        Raises:
            PeerError: the worker has died.
        """
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            self.__exit__()
            raise PeerError(
                f"worker: ended with status {self._process.returncode}; its message is "
                "above"
            ) from None


def command(python: Path) -> list[str]:
    """Return the command line that starts the worker.

    Raises:
        PeerError: it does not exist.
    """
    if not python.exists():
        raise PeerError(
            f"{python}: no such interpreter; run python -m benchmarks.peer setup"
        )
    return [str(python), "-m", "benchmarks.peer.worker"]
