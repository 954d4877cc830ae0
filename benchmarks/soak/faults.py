"""Breaks servers on purpose: kills, a full disk, files that are cut off or gone.

One short-lived server has a trace whose disk is full and a file of counters that is cut
off, and then gets SIGTERM under load. The other loses, under load, the folder of its
trace, the files of its live page and its file of counters, and then its engine by
SIGKILL. /dev/full stands in for a full disk: the next files of the trace are links to
it, so that writing them fails as it does there.
"""

import asyncio
import getpass
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.load import open_session
from benchmarks.server import Server, start
from benchmarks.soak import settings, storm
from benchmarks.soak.asks import COMPLETIONS, Ask, draw_wave
from benchmarks.soak.promises import (
    CUT_FILE,
    DISK,
    KILLED,
    OBSERVERS,
    TERMINATED,
    Ledger,
    Promise,
)
from benchmarks.soak.watch import own_traceback, role_of

END_SECONDS = 60.0
LOAD_SECONDS = 2.0
POLL_SECONDS = 0.2
LINKS = 200
"""Files of a trace that are linked to /dev/full: more than are written meanwhile."""
ENGINES = ("engine", "worker")
SAID = "cannot write to the trace"
TOLD = {
    SAID: 1,
    "LiveEvents is off from here on": 1,
    "Snapshots is off from here on": 1,
    "without its series at /metrics": 1,
}
"""Lines of a log that tell of observers that are off, and how often each is there."""
OFF = re.compile(r'^kvpolicy_observers_off\{.*observer="(\w+)".*\} (\S+)$', re.M)
HEAD_AT, HEAD = 8, b"\xff" * 16
"""Place of a count of records in a file of the live page, and one that is too high."""


@dataclass(frozen=True)
class Faulty:
    """A server that will be broken."""

    server: Server
    temporary: Path
    trace: Path


def run(model: Path, gates: Path, logs: Path, seed: int, ledger: Ledger) -> None:
    """Break two servers.

    Raises:
        BrokenPromise: one did not behave as promised.
    """
    with faulty("terminated", model, gates, logs) as one:
        asyncio.run(fill_disk(one, ledger))
        asyncio.run(cut_counters(one, ledger))
        asyncio.run(terminate(one, seed, ledger))
    with faulty("killed", model, gates, logs) as one:
        asyncio.run(remove_trace(one, ledger))
        asyncio.run(break_observers(one, seed, ledger))
        asyncio.run(kill_engine(one, seed, ledger))


@contextmanager
def faulty(name: str, model: Path, gates: Path, logs: Path) -> Iterator[Faulty]:
    """Yield a healthy server with a trace and temporary files of its own."""
    temporary = Path(tempfile.mkdtemp(prefix="kv"))  # short: vLLM makes sockets there
    trace = logs / f"{name}-trace"
    words = settings.policy_arguments(model, gates, trace=str(trace))
    # vLLM compiles at the first request that needs it, on a busy machine for minutes:
    # the result is kept where the other servers keep theirs.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    environment = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    server = start(name, words, logs, environment)
    try:
        server.wait_until_healthy()
        yield Faulty(server, temporary, trace)
    finally:
        server.stop()
        shutil.rmtree(temporary, ignore_errors=True)


async def answers(server: Server) -> bool:
    """Return whether a request that has events is answered in full."""
    body = {"model": "model", "prompt": "x" * 90, "max_tokens": 120, "temperature": 0}
    ask = Ask("long", COMPLETIONS, body | {"ignore_eos": True})
    (outcome,) = await storm.play(server.url, [ask])
    return outcome.status == 200 and storm.is_whole(ask, outcome)


async def fill_disk(one: Faulty, ledger: Ledger) -> None:
    """Let the trace write to a full disk."""
    is_first = await answers(one.server)
    (run_folder,) = one.trace.iterdir()
    written = len(list(run_folder.iterdir()))
    ledger.check(DISK, is_first and written > 0, "no event was recorded before")
    for number in range(written, written + LINKS):
        (run_folder / f"{number:06d}.npz").symlink_to("/dev/full")
    await _check_goes_on(one, "No space left on device", ledger)


async def remove_trace(one: Faulty, ledger: Ledger) -> None:
    """Delete the folder that the trace writes to."""
    shutil.rmtree(one.trace)
    await _check_goes_on(one, "No such file or directory", ledger)


async def _check_goes_on(one: Faulty, reason: str, ledger: Ledger) -> None:
    is_answered = await answers(one.server)
    ledger.check(DISK, is_answered, f"no answer after: {reason}")
    lines = one.server.log.read_text(errors="replace").splitlines()
    told = [line for line in lines if SAID in line]
    is_told = len(told) == 1 and reason in told[0]
    ledger.check(DISK, is_told, f"the log has {told}, expected one line: {reason}")


async def cut_counters(one: Faulty, ledger: Ledger) -> None:
    """Cut off the file of counters that all processes have open."""
    (path,) = one.temporary.glob("vllm-kvpolicy-*.counters")
    os.truncate(path, 3)
    for _ in range(2):
        ledger.check(CUT_FILE, await answers(one.server), "no answer")
        metrics = await asyncio.to_thread(one.server.metrics)
        is_there = metrics.get("vllm:num_requests_running") == 0
        ledger.check(CUT_FILE, is_there, "/metrics has no vllm:num_requests_running")


async def break_observers(one: Faulty, seed: int, ledger: Ledger) -> None:
    """Spoil the files of the live page, then remove that of counters, under load.

    A client of the live page listens; its connection breaks off in the end. The trace
    is off already.
    """
    async with (
        open_session(one.server.url) as session,
        session.get("/kv_policy/stream") as stream,
        _load(one, seed),
    ):
        await stream.content.readline()
        for path in one.temporary.glob("vllm-kvpolicy-*.live"):
            with path.open("r+b") as file:
                file.seek(HEAD_AT)
                file.write(HEAD)
        ledger.check(OBSERVERS, await answers(one.server), "no answer")
        await _check_off(one, {"trace": 1, "live": 1, "counters": 0}, ledger)
        (path,) = one.temporary.glob("vllm-kvpolicy-*.counters")
        path.unlink()
        ledger.check(OBSERVERS, await answers(one.server), "no answer")
        for _ in range(2):
            await _check_off(one, {"counters": 1}, ledger)
        stream.close()
    ledger.check(OBSERVERS, await answers(one.server), "no answer")
    text = one.server.log.read_text(errors="replace")
    told = {said: text.count(said) for said in TOLD}
    ledger.check(OBSERVERS, told == TOLD, f"the log has {told}, expected {TOLD}")


async def _check_off(one: Faulty, expected: dict[str, float], ledger: Ledger) -> None:
    """Check what /metrics tells of observers that are off."""
    async with (
        open_session(one.server.url) as session,
        session.get("/metrics") as response,
    ):
        text = await response.text()
    found = {name: float(value) for name, value in OFF.findall(text)}
    said = f"/metrics tells {found}, expected {expected}"
    ledger.check(OBSERVERS, found == expected, said)


async def terminate(one: Faulty, seed: int, ledger: Ledger) -> None:
    """Send SIGTERM to a server under load, whose clients leave when its engine ended.

    vLLM waits for the connections of clients that stay.
    """
    process = one.server.process
    engine = [each for each in _family(one) if role_of(each) in ENGINES]
    async with _load(one, seed):
        process.send_signal(signal.SIGTERM)
        alive = await asyncio.to_thread(still_running, engine, END_SECONDS)
    ledger.check(TERMINATED, not alive, f"{alive} go on")
    ended = await _ends(one)
    ledger.check(TERMINATED, ended, f"the server goes on for {END_SECONDS:.0f} s")
    found = own_traceback(one.server.log)
    ledger.check(TERMINATED, found is None, f"its log has a traceback: {found}")
    _check_no_files(one, TERMINATED, ledger)


async def kill_engine(one: Faulty, seed: int, ledger: Ledger) -> None:
    """Kill the engine's process of a server under load.

    Its worker is vLLM's to end. One that ends after the server leaves a file of the
    live page, which it has locked until then; the next engine removes it.
    """
    (engine,) = [each for each in _family(one) if role_of(each) == "engine"]
    async with _load(one, seed):
        engine.kill()
        ended = await _ends(one)
    ledger.check(KILLED, ended, f"the server goes on for {END_SECONDS:.0f} s")
    _check_no_files(one, KILLED, ledger, "vllm-kvpolicy-*.counters")


@asynccontextmanager
async def _load(one: Faulty, seed: int) -> AsyncIterator[None]:
    """Load a server, and take the clients away in the end."""
    load = asyncio.create_task(storm.play(one.server.url, draw_wave(seed, -1, 40)))
    await asyncio.sleep(LOAD_SECONDS)
    try:
        yield
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


def _family(one: Faulty) -> list[psutil.Process]:
    """Return the processes below the server's own."""
    return psutil.Process(one.server.process.pid).children(recursive=True)


def still_running(
    processes: Sequence[psutil.Process], seconds: float
) -> list[psutil.Process]:
    """Return the processes that have not ended after some time.

    One that has ended is a zombie until its parent collects it, which vLLM's server
    does not do with a killed engine before it ends itself.
    """
    deadline = time.monotonic() + seconds
    while True:
        alive = [each for each in processes if _runs(each)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(POLL_SECONDS)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _ends(one: Faulty) -> bool:
    """Return whether a server's own process ends in time."""
    try:
        await asyncio.to_thread(one.server.process.wait, END_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _check_no_files(
    one: Faulty, promise: Promise, ledger: Ledger, pattern: str = "vllm-kvpolicy-*"
) -> None:
    left = [path.name for path in one.temporary.glob(pattern)]
    ledger.check(promise, not left, f"{left} are left")
