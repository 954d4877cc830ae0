"""Looks at a server's processes, pool and log in a moment without requests."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.load import open_session
from benchmarks.server import Server
from benchmarks.soak.promises import DESCRIPTORS, ENGINE, LOG, POOL, Ledger

QUIET_SECONDS = 60.0
POLL_SECONDS = 0.3
EMPTY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
EMPTY_OF_POLICIES = ("kvpolicy_local_blocks", "kvpolicy_global_blocks")
NO_ANSWER = (aiohttp.ClientError, OSError, psutil.Error)
"""What a look at a server raises that has ended."""
SPARE_DESCRIPTORS, SPARE_THREADS = 16, 16
"""That a process may have above its first quiet moment: pools of threads and sockets
fill up once, at most so far; a leak of one per wave is found after as many waves."""
TRACEBACK = "Traceback (most recent call last)"
OWN_FRAME = "/vllm_kvpolicy/"
REFUSALS = "KVPolicyRequestError", "VLLMValidationError"
"""What refused requests raise, here and in vLLM, whose errors pass frames of this
package; vLLM's /v1/messages logs every error of a client."""


@dataclass(frozen=True)
class Sample:
    """What a server's processes held in a quiet moment.

    Attributes:
        requests: that were sent to the server before.
        resident_bytes: by process: `api`, `engine`, `worker` and others by their names.
        descriptors: open ones, by process.
        threads: by process.
        pids: by process.
    """

    requests: int
    resident_bytes: dict[str, int]
    descriptors: dict[str, int]
    threads: dict[str, int]
    pids: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Resident memory of all processes; what they share counts in each."""
        return sum(self.resident_bytes.values())


def sample(server: Server, requests: int) -> Sample:
    """Look at the processes of a server.

    Args:
        requests: that were sent to it so far.
    """
    first = psutil.Process(server.process.pid)
    found: dict[str, tuple[int, ...]] = {}
    for each in [first, *first.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # a helper that has just ended
            memory, descriptors = each.memory_info().rss, each.num_fds()
            numbers = memory, descriptors, each.num_threads(), each.pid
            role = role_of(each)
            # A child that does not run its own program yet has its parent's name.
            found[f"{role} {each.pid}" if role in found else role] = numbers
    columns = [{role: own[i] for role, own in found.items()} for i in range(4)]
    return Sample(requests, *columns)


def role_of(process: psutil.Process) -> str:
    """Return what a process of a server does, by the name that vLLM gives it."""
    title = " ".join(process.cmdline())
    roles = {
        "VLLM::EngineCore": "engine",
        "VLLM::Worker": "worker",
        "resource_tracker": "resource tracker",
        " serve ": "api",
    }
    found = [role for mark, role in roles.items() if mark in title]
    return found[0] if found else f"{process.name()} {process.pid}"


async def wait_for_quiet(server: Server, seconds: float = QUIET_SECONDS) -> str | None:
    """Wait until a server has no request and holds no block.

    Gauges are those of the last engine step, so a request of one token goes before.

    Args:
        server: whose clients have all gone.

    Returns:
        None once it is quiet; which gauges are not zero if it does not get so.
    """
    deadline = time.monotonic() + seconds
    body = {"model": "model", "prompt": "a", "max_tokens": 2, "ignore_eos": True}
    async with open_session(server.url) as session:
        while True:
            async with session.post("/v1/completions", json=body) as response:
                await response.read()
            await asyncio.sleep(POLL_SECONDS)
            has_policy = "--kv-policy" in server.arguments
            left = not_empty(await asyncio.to_thread(server.metrics), has_policy)
            if not left:
                return None
            if time.monotonic() > deadline:
                return f"{server.name} has after {seconds:.0f} s {json.dumps(left)}"


def not_empty(metrics: dict[str, float], has_policy: bool) -> dict[str, float]:
    """Return the gauges of an idle server that are not zero, or missing."""
    names = [*EMPTY, *(EMPTY_OF_POLICIES if has_policy else ())]
    return {name: metrics.get(name, -1.0) for name in names if metrics.get(name, -1.0)}


def check_quiet(
    server: Server, before: Sample, now: Sample, left: str | None, ledger: Ledger
) -> None:
    """Check what has to hold of a server in a quiet moment.

    Args:
        before: its first quiet moment.
        left: of `wait_for_quiet`.

    Raises:
        BrokenPromise: something does not hold.
    """
    ledger.check(POOL, left is None, str(left))
    same = before.pids == now.pids
    ledger.check(ENGINE, same, f"they were {before.pids} and are {now.pids}")
    for what, most, then, later in (
        ("descriptors", SPARE_DESCRIPTORS, before.descriptors, now.descriptors),
        ("threads", SPARE_THREADS, before.threads, now.threads),
    ):
        grown = {role: later[role] - then[role] for role in then}
        role = max(grown, key=grown.__getitem__)
        said = f"{server.name}: {role} has {later[role]} {what}, had {then[role]}"
        ledger.check(DESCRIPTORS, grown[role] <= most, said)
    found = own_traceback(server.log)
    ledger.check(LOG, found is None, f"{server.name}'s log ends one with: {found}")


def own_traceback(log: Path) -> str | None:
    """Return the last line of the first traceback that has a frame of this package.

    Those of refused requests are no faults.

    Args:
        log: of a server; each of its lines may begin with a process's name.
    """
    lines = log.read_text(errors="replace").splitlines()
    for at, line in enumerate(lines):
        if TRACEBACK not in line:
            continue
        indent = line.index(TRACEBACK)
        frames: list[str] = []
        for below in lines[at + 1 :]:
            frames.append(below[indent:])
            if not frames[-1].startswith(" "):
                break
        is_refusal = frames[-1].partition(":")[0].endswith(REFUSALS)
        if not is_refusal and any(OWN_FRAME in frame for frame in frames):
            return frames[-1]
    return None


def record_of(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return samples for a record, memory in MB."""
    return [
        {
            "requests": each.requests,
            "resident_mb": {
                role: round(size / 1e6, 2) for role, size in each.resident_bytes.items()
            },
            "descriptors": sum(each.descriptors.values()),
            "threads": sum(each.threads.values()),
        }
        for each in samples
    ]
