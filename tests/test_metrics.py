"""Counter files: values cross processes, and killed engines leave none for ever."""

import fcntl
import subprocess
import sys
import tempfile

import pytest

from vllm_kvpolicy.metrics import (
    Collector,
    CounterFile,
    counter_path,
    remove_stale_files,
)

KILLED = """
import os, signal, sys, tempfile
from vllm_kvpolicy.metrics import CounterFile
tempfile.tempdir = sys.argv[1]
file = CounterFile("killed", create=True)
file.add("events", 2)
print("made", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_worker_reads_and_adds_to_the_engines_file(folder):
    engine = CounterFile("one", create=True)
    worker = CounterFile("one", create=False)
    engine.add("events", 2)
    worker.add("events", 1)
    assert engine.read()["events"] == worker.read()["events"] == 3
    engine.remove()
    with pytest.raises(FileNotFoundError):
        CounterFile("one", create=False)


def test_files_of_killed_engines_are_removed_and_those_of_live_ones_stay(folder):
    other = folder / "vllm-kvpolicy-mine.txt"
    other.write_text("not a counter file")
    own = CounterFile("own", create=True)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "made\n"
    CounterFile("second", create=True)
    assert CounterFile("killed", create=False).read()["events"] == 2
    process.communicate("now\n")
    third = CounterFile("third", create=True)
    assert not counter_path("killed").exists()
    # Of the second nobody holds the object.
    assert sorted(folder.iterdir()) == sorted([other, own.path, third.path])


def test_a_file_of_another_user_is_left_alone(folder, monkeypatch):
    path = counter_path("theirs")
    path.write_bytes(b"")
    monkeypatch.setattr("os.getuid", lambda: path.stat().st_uid + 1)
    CounterFile("own", create=True)
    assert path.exists()


def test_a_file_made_anew_under_a_removed_name_stays(folder, monkeypatch):
    """Who still holds the removed file must not remove the new engine's."""
    path = counter_path("own")
    path.write_bytes(b"")
    new = []

    def late_lock(descriptor, operation):
        if operation & fcntl.LOCK_EX and not new:
            path.unlink()  # another engine was faster
            new.append(CounterFile("own", create=True))
        return lock(descriptor, operation)

    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", late_lock)
    remove_stale_files()
    assert new and CounterFile("own", create=False).read()["events"] == 0


def test_a_file_removed_before_it_was_locked_is_made_again(folder, monkeypatch):
    removed = []

    def late_lock(descriptor, operation):
        if operation & fcntl.LOCK_SH and not removed:
            counter_path("own").unlink()  # another engine took it for a dead one's
            removed.append(descriptor)
        return lock(descriptor, operation)

    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", late_lock)
    CounterFile("own", create=True).add("events", 1)
    assert removed and CounterFile("own", create=False).read()["events"] == 1


def test_an_engine_starts_where_files_cannot_be_locked(folder, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    CounterFile("own", create=True).add("events", 1)
    assert CounterFile("own", create=False).read()["events"] == 1


def test_a_file_that_is_still_empty_yields_nothing(folder):
    counter_path("own").write_bytes(b"")
    assert list(Collector("own", {}).collect()) == []
