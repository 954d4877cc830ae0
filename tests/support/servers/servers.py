"""Starts a real `vllm serve` and waits until it answers."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

START_SECONDS = 420
STOP_SECONDS, END_SECONDS = 60, 10  # of the server, and then of its engines


@contextmanager
def serving(
    model: Path,
    arguments: list[str],
    folder: Path,
    port: int | None = None,
    shared: Path | None = None,
) -> Iterator[str]:
    """Run a server; the test fails with its log where it does not come up.

    Args:
        arguments: of `vllm serve`, beside model and port.
        folder: for the log; new servers need new folders.
        port: to listen on; None for one that nobody listens on.
        shared: see `started`.

    Yields:
        The server's root URL.
    """
    port = port or free_port()
    arguments = [*arguments, "--host", "127.0.0.1", "--port", str(port)]
    with started(model, arguments, folder, shared) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, folder / "log")
        yield url


@contextmanager
def started(
    model: Path, arguments: list[str], folder: Path, shared: Path | None = None
) -> Iterator[subprocess.Popen]:
    """Run `vllm serve` without waiting for it, and stop it; see `serving`.

    Its temporary files lie in `folder / "tmp"`, a link to a folder with a short name:
    vLLM makes sockets there, whose paths hold at most 107 bytes. Counter files and
    those of the live page have to be gone at the end, as have all its processes.

    Args:
        shared: a folder with a short name for the temporary files of several servers;
            then it is the test that looks at what is left.
    """
    short = tempfile.mkdtemp(prefix="kv") if shared is None else str(shared)
    (folder / "tmp").symlink_to(short)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"HF_HUB_OFFLINE": "1", "TMPDIR": short}
    # In an empty folder torch would first compile its headers, for a minor function.
    environment |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    with (folder / "log").open("w") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdout=output, stderr=output, env=environment
        )
    try:
        yield process
    finally:
        _stop(process)
        left = [path.name for path in Path(short).glob("vllm-kvpolicy-*")]
        if shared is None:
            shutil.rmtree(short, ignore_errors=True)
    assert shared is not None or left == [], left


def _stop(process: subprocess.Popen) -> None:
    """Stop a server; kill what of it and its engines goes on."""
    running = process.poll() is None
    below = psutil.Process(process.pid).children(recursive=True) if running else []
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(below, END_SECONDS)
    for each in alive:
        each.kill()
    psutil.wait_procs(alive)


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; of one that has just ended an empty one."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on.

    From below those that Linux gives to outgoing connections: a server binds its port
    seconds later, when one of the others would often be in use again. Above 10080, the
    last one that Chromium refuses to open.
    """
    while True:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", 10_100 + secrets.randbelow(21_900)))
            except OSError:
                continue
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
