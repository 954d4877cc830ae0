"""What `started` leaves behind: no process, and no file of a server's counters."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from support.servers import servers

# In place of the interpreter that runs `vllm serve`: a server that, like its engine,
# goes on after Ctrl-C, as with a client that keeps its connection open.
STUBBORN = """#!/bin/sh
trap '' INT
sleep 300 &
{}
echo $! > "$TMPDIR/engine"
wait
"""


@pytest.fixture
def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that stands in for a server."""
    program = tmp_path / "python"
    program.write_text(STUBBORN.format(""))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(servers, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(servers, "END_SECONDS", 0.2)
    return program


def engine_in(folder: Path) -> psutil.Process:
    """Wait until the server has its engine."""
    path = folder / "tmp" / "engine"
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    return psutil.Process(int(path.read_text()))


def test_a_server_that_does_not_stop_is_killed_with_its_engine(
    stubborn: Path, tmp_path: Path
) -> None:
    with servers.started(tmp_path, [], tmp_path) as process:
        engine = engine_in(tmp_path)
        assert engine.is_running()
    assert process.returncode == -9
    assert not engine.is_running()
    assert not (tmp_path / "tmp").exists()


@pytest.mark.parametrize("name", ["1.counters", "1-0.live"])
def test_a_file_that_is_left_fails(stubborn: Path, tmp_path: Path, name: str) -> None:
    stubborn.write_text(STUBBORN.format(f': > "$TMPDIR/vllm-kvpolicy-{name}"'))
    with (
        pytest.raises(AssertionError, match=name),
        servers.started(tmp_path, [], tmp_path),
    ):
        engine_in(tmp_path)
