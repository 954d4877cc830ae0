"""Rings: records cross processes while somebody listens, and slow readers skip."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from vllm_kvpolicy.observe import shared_files as ring
from vllm_kvpolicy.observe.shared_files import (
    DATA_BYTES,
    LISTEN_SECONDS,
    NUM_ROWS,
    Ring,
    remove_stale_files,
)


@pytest.fixture
def pair():
    """A writer and a reader of one file."""
    return Ring("one", create=True), Ring("one", create=False)


def numbers(records):
    return [record["n"] for record in records]


def test_a_reader_gets_what_is_new_once(pair):
    writer, reader = pair
    assert reader.read() == ([], 0)
    assert writer.append({"n": 0}) and writer.append({"n": 1})
    records, after = reader.read()
    assert numbers(records) == [0, 1]
    assert reader.read(after) == ([], 2)
    writer.append({"n": 2})
    assert numbers(reader.read(after)[0]) == [2]


def test_a_reader_that_falls_behind_skips_the_oldest(pair):
    writer, reader = pair
    for n in range(NUM_ROWS + 10):
        writer.append({"n": n})
    records, after = reader.read(3)
    assert numbers(records) == list(range(10, NUM_ROWS + 10))
    assert after == NUM_ROWS + 10


def test_large_records_push_out_old_ones_and_never_wrap(pair):
    writer, reader = pair
    text = "x" * (DATA_BYTES // 3)
    for n in range(7):
        writer.append({"n": n, "text": text})
    records, _ = reader.read()
    assert numbers(records) == [5, 6]
    assert all(record["text"] == text for record in records)


def test_a_record_larger_than_the_file_is_left_out(pair):
    writer, reader = pair
    assert not writer.append({"n": "x" * DATA_BYTES})
    assert reader.read() == ([], 0)


def test_a_record_that_is_being_overwritten_is_no_record(pair):
    writer, reader = pair
    writer.append({"n": 0})
    writer.append({"n": 1})
    writer.write_bytes(ring._DATA_AT + 3, b"?")
    assert numbers(reader.read()[0]) == [1]


def test_a_reader_of_an_older_file_begins_anew(pair):
    writer, reader = pair
    writer.append({"n": 7})
    assert numbers(reader.read(99)[0]) == [7]


def test_somebody_listens_for_some_seconds(pair, monkeypatch):
    writer, reader = pair
    now = ring.time.monotonic()
    monkeypatch.setattr(ring.time, "monotonic", lambda: now)
    assert not writer.is_heard()
    reader.listen()
    assert writer.is_heard()
    now += LISTEN_SECONDS + 0.01
    assert not writer.is_heard()


def test_the_file_is_private_small_until_used_and_removed_with_its_engine(folder):
    writer = Ring("one", create=True)
    status = writer.path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 < 2**16 < status.st_size
    remove_stale_files()
    assert writer.path.exists()  # its lock says that its engine lives
    path = writer.path
    del writer
    remove_stale_files()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        Ring("one", create=False)


def test_a_file_cut_short_is_an_empty_one(pair):
    writer, reader = pair
    writer.append({"n": 0})
    reader.listen()
    os.truncate(writer.path, 0)
    assert not writer.is_heard() and reader.read() == ([], 0)
    reader.listen()
    assert writer.is_heard() and writer.append({"n": 1})
    assert numbers(reader.read(7)[0]) == [1]


def test_a_full_disk_is_told_once_and_nothing_is_written(pair, monkeypatch, policy_log):
    writer, reader = pair
    writer.append({"n": 0})

    def pwrite(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", pwrite)
        assert not writer.append({"n": 1}) and not writer.append({"n": 2})
    said = f"cannot write to {writer.path} (No space left on device)"
    assert [said in text for text in policy_log.messages] == [True]
    assert numbers(reader.read()[0]) == [0]
    assert writer.append({"n": 3}) and numbers(reader.read()[0]) == [0, 3]


WORKER = """
import os, signal, sys, tempfile
from vllm_kvpolicy.observe.shared_files import RANK, Ring
tempfile.tempdir = sys.argv[1]
ring = Ring(RANK.format("own-0", 0), create=True)
print("made", flush=True)
sys.stdin.readline()
assert ring.append({"n": 0})
os.kill(os.getpid(), signal.SIGKILL)
"""
SERVER = """
import sys, tempfile
from vllm_kvpolicy.observe.shared_files import remove_files_at_exit
tempfile.tempdir = sys.argv[1]
remove_files_at_exit("own")
"""


def test_a_worker_that_outlives_its_server_leaves_no_file(folder):
    """vLLM waits for engines, not for their workers; one writes late, and is killed."""
    other = Ring("other-0-rank0", create=True)
    command = [sys.executable, "-c"]
    worker = subprocess.Popen(
        [*command, WORKER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout.readline() == "made\n"
    assert len(list(folder.iterdir())) == 2
    subprocess.run([*command, SERVER, str(folder)], check=True)
    worker.communicate("now\n")
    assert worker.returncode == -signal.SIGKILL
    assert list(folder.iterdir()) == [other.path]
