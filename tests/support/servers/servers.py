"""Starts a real `vllm serve` and waits until it answers."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

START_SECONDS = 420


@contextmanager
def serving(model: Path, arguments: list[str], folder: Path) -> Iterator[str]:
    """Run a server; the test fails with its log where it does not come up.

    Args:
        model: model folder.
        arguments: of `vllm serve`, beside model and port.
        folder: for the log and temporary files.

    Yields:
        The server's root URL.
    """
    log, port = folder / "log", _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += [*arguments, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    pytest.fail(f"no server:\n{log.read_text()[-4000:]}")
