"""Starts `vllm serve` processes, waits for them, reads /metrics and stops them."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.25
LOG_TAIL_LINES = 30
ERROR_LINE = re.compile(r"^error: .+|\b\w*Error: .+")
NO_CAUSE = (" WARNING ", "See root cause above")
"""In lines that do not say why: warnings, and what follows an engine's own error."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
SKIPPED_SUFFIXES = ("_bucket", "_created")
CACHE_INFO = "vllm:cache_config_info"


class ServerError(Exception):
    """A server that did not start or has died."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings that all servers of a comparison share.

    Attributes:
        max_model_len: longest request, in tokens, prompt and output together.
        max_num_seqs: most requests in one engine step; None for vLLM's default.
        kv_cache_bytes: memory for the KV cache.
        block_size: tokens; None for blocks of vLLM's choice, as many as fit.
        blocks: of the pool; None for as many as fit.
    """

    model: str
    max_model_len: int
    max_num_seqs: int | None
    kv_cache_bytes: int
    seed: int = 0
    dtype: str = "float32"
    block_size: int | None = None
    blocks: int | None = None

    def arguments(self) -> list[str]:
        """Return the arguments of `vllm serve`, the model first."""
        numbers = {
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": self.max_num_seqs,
            "--kv-cache-memory-bytes": self.kv_cache_bytes,
            "--seed": self.seed,
            "--block-size": self.block_size,
            "--num-gpu-blocks-override": self.blocks,
        }
        words = [self.model, "--served-model-name", "model", "--dtype", self.dtype]
        words += ["--enforce-eager"]
        for flag, number in numbers.items():
            words += [] if number is None else [flag, str(number)]
        return words


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        arguments: arguments of `vllm serve` without the port.
        log: file with its standard output and error.
        process: the process, leader of its own process group.
    """

    name: str
    arguments: tuple[str, ...]
    url: str
    log: Path
    process: subprocess.Popen

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics, summed over labels."""
        return parse_metrics(self._get("/metrics"))

    def cache_info(self) -> dict[str, str]:
        """Return vLLM's cache configuration, such as `num_gpu_blocks`, as text."""
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                if sample.name == CACHE_INFO:
                    return sample.labels
        raise ServerError(f"{self.name}: /metrics has no {CACHE_INFO}")

    def pool(self) -> dict[str, int]:
        """Return the pool's `blocks`, `block_size` and `pool_tokens`, their product."""
        info = self.cache_info()
        blocks, size = int(info["num_gpu_blocks"]), int(info["block_size"])
        return {"blocks": blocks, "block_size": size, "pool_tokens": blocks * size}

    def is_healthy(self) -> bool:
        """Return whether the server answers; raise ServerError if it has died."""
        if self.process.poll() is not None:
            raise ServerError(
                f"{self.name}: exited with status {self.process.returncode}; the log "
                f"ends with\n{tail(self.log)}"
            )
        try:
            self._get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def wait_until_healthy(self, seconds: float = START_SECONDS) -> None:
        """Wait until the server answers.

        Raises:
            ServerError: it has died, or has not answered for `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not self.is_healthy():
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name}: no answer after {seconds:.0f} s; the log ends with\n"
                    f"{tail(self.log)}"
                )
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End the process group: first by SIGTERM, then by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                self.process.wait()
                return

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()


def start(
    name: str,
    arguments: Sequence[str],
    log_folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Start a server without waiting for it.

    From then on SIGTERM ends this program like Ctrl-C, so that it stops its servers.

    Args:
        environment: variables beside those of this program and ENVIRONMENT.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    port = free_port()
    executable = Path(sys.executable).with_name("vllm")
    command = [str(executable), "serve", *arguments, "--host", HOST, "--port"]
    log = log_folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
    return Server(name, tuple(arguments), f"http://{HOST}:{port}", log, process)


@contextmanager
def running(
    arguments: dict[str, list[str]],
    log_folder: Path,
    failures: dict[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Server]]:
    """Start several servers together and stop them all at the end.

    Args:
        failures: gets the name of each server that does not start, and why; None if
            all must start.

    Yields:
        Server name -> healthy server.

    Raises:
        ServerError: one did not start and `failures` is None, or none started.
    """
    with ExitStack() as stack:
        servers = {}
        for name, words in arguments.items():
            servers[name] = start(name, words, log_folder, environment)
            stack.callback(servers[name].stop)
        for name, server in list(servers.items()):
            try:
                server.wait_until_healthy()
            except ServerError as error:
                if failures is None:
                    raise
                what = str(error).partition("; the log")[0]
                failures[name] = f"{what}: {cause(server.log)}"
                servers.pop(name).stop()
        if failures and not servers:
            raise ServerError("\n".join(["no server started:", *failures.values()]))
        yield servers


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def parse_metrics(text: str) -> dict[str, float]:
    """Return samples of Prometheus text by name, summed over labels.

    Buckets and creation times are omitted; counters keep their `_total`, histograms
    give `_count` and `_sum`.
    """
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(SKIPPED_SUFFIXES):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log file."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def cause(path: Path) -> str:
    """Return the error that a log names as the cause, else its last line."""
    lines = path.read_text(errors="replace").splitlines() or ["the log is empty"]
    errors = [
        f"{match.group()} {below.strip(' -')}" if line.endswith(":") else match.group()
        for line, below in zip(lines, [*lines[1:], ""], strict=True)
        if (match := ERROR_LINE.search(line))
        if not any(words in line for words in NO_CAUSE)
    ]
    return (errors or lines)[-1]
