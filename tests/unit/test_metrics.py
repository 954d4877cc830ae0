"""Counter files: values cross processes, and killed engines leave none for ever."""

import subprocess
import sys
import tempfile

import pytest

from vllm_kvpolicy.metrics import CounterFile, counter_path

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
