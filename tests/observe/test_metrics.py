"""Counter files: values cross processes, and killed engines leave none for ever."""

import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from support.made_events import BLOCK, FIRST
from vllm_kvpolicy.observe.metrics import (
    Collector,
    CounterFile,
    EngineCounters,
    WorkerCounters,
    counter_path,
    exposition,
)
from vllm_kvpolicy.observe.shared_files import (
    engines_here,
    own_engine,
    remove_stale_files,
)

KILLED = """
import os, signal, sys, tempfile
from vllm_kvpolicy.observe.metrics import CounterFile
tempfile.tempdir = sys.argv[1]
file = CounterFile("killed", create=True)
file.add("events", 2)
print("made", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_cut_short_counts_on(folder):
    engine, api = CounterFile("own", create=True), CounterFile("own", create=False)
    engine.add("events", 2)
    engine.add("steps", 5)
    os.truncate(engine.path, 0)
    engine.add("events", 1)
    assert (api.read()["events"], api.read()["steps"]) == (3, 0)
    engine.add("steps", 1)
    assert api.read()["steps"] == 6


def test_a_worker_whose_file_is_gone_serves_on(folder, policy_log):
    CounterFile("one", create=True).remove()
    worker = WorkerCounters("one", 32)
    for _ in range(3):
        worker.add_events(1, 0.1)
        worker.add_tokens([])
    said = "WorkerCounters is off from here on; serving goes on"
    assert policy_log.messages == [said]


def test_a_worker_adds_fields_of_its_own_to_the_engines_file(folder):
    engine = CounterFile("one", create=True)
    worker = CounterFile("one", create=False)
    engine.add("steps", 2)
    worker.add("events", 1)
    engine.add("steps", 1)
    worker.add("events", 4)
    for file in (engine, worker):
        assert (file.read()["steps"], file.read()["events"]) == (3, 5)
    engine.remove()
    with pytest.raises(FileNotFoundError):
        CounterFile("one", create=False)


def test_tokens_of_events_and_of_requests_are_counted(folder):
    """Of 3 superblocks of 2 tokens, 2 were local until now and 1 stays; 1 token is."""
    file = CounterFile("one", create=True)
    event = replace(FIRST, num_global=1)
    WorkerCounters("one", BLOCK).add_tokens([(event, 3, 1)])
    EngineCounters(file).tell_ratio([(10, 30), (20, 30)])
    found = CounterFile("one", create=False).read()
    assert (found["tokens_kept"], found["tokens_dropped"]) == (3, 4)
    assert (found["tokens_left"], found["keep_ratio"]) == (4, 0.5)


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


@pytest.fixture
def before_lock(monkeypatch):
    """Let another engine unlink the file before the first lock of a kind is on it."""
    lock, done = fcntl.flock, []

    def late(kind, then=lambda: True):
        def late_lock(descriptor, operation):
            if operation & kind and not done:
                counter_path("own").unlink()
                done.append(descriptor)
                done.append(then())
            return lock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", late_lock)
        return done

    return late


def test_a_file_made_anew_under_a_removed_name_stays(folder, before_lock):
    """Who still holds the removed file must not remove the new engine's."""
    counter_path("own").write_bytes(b"")
    done = before_lock(fcntl.LOCK_EX, lambda: CounterFile("own", create=True))
    remove_stale_files()
    assert done and CounterFile("own", create=False).read()["events"] == 0


def test_a_file_removed_before_it_was_locked_is_made_again(folder, before_lock):
    done = before_lock(fcntl.LOCK_SH)
    CounterFile("own", create=True).add("events", 1)
    assert done and CounterFile("own", create=False).read()["events"] == 1


def test_an_engine_starts_where_files_cannot_be_locked(folder, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    CounterFile("own", create=True).add("events", 1)
    assert CounterFile("own", create=False).read()["events"] == 1


def test_of_a_file_that_is_gone_there_is_only_that_it_is(folder, policy_log):
    """Gone, cut short or a folder: the API process tells, and logs it once."""
    files = {index: CounterFile(f"own-{index}", create=True) for index in range(4)}
    files[0].path.unlink()
    os.truncate(files[1].path, 8)
    files[2].path.unlink()
    files[2].path.mkdir()
    missed = set()
    engines = {index: f"own-{index}" for index in files}
    for _ in range(3):
        families = list(Collector(engines, "tiny", missed).collect())
        found = [
            (family.name, sample.labels["engine"], sample.value)
            for family in families
            for sample in family.samples
            if sample.labels.get("observer") == "counters"
        ]
        name = "kvpolicy_observers_off"
        assert found == [(name, str(n), float(n < 3)) for n in range(4)]
        whole = [f for f in families if f.name != name]
        assert {s.labels["engine"] for f in whole for s in f.samples} == {"3"}
    assert policy_log.messages == [
        f"cannot read {files[n].path}; serving goes on without its series at /metrics"
        for n in range(3)
    ]


def test_an_observer_that_is_off_is_counted(folder):
    file = CounterFile("own", create=True)
    EngineCounters(file).note_off("live")
    for _ in range(2):  # two ranks of one engine
        WorkerCounters("own", 32, counts=False).note_off("trace")
    off = {
        sample.labels["observer"]: sample.value
        for family in Collector({0: "own"}, "tiny", set()).collect()
        for sample in family.samples
        if sample.name == "kvpolicy_observers_off"
    }
    assert off == {"trace": 1, "live": 1, "counters": 0}


def config_of(index=0, local=1):
    """Return what is read of a VllmConfig, of the server "s"."""
    ranks = {"data_parallel_index": index, "data_parallel_size_local": local}
    model = SimpleNamespace(served_model_name=["tiny", "alias"])
    own = {"instance_id": "s", "model_config": model}
    return SimpleNamespace(parallel_config=SimpleNamespace(**ranks), **own)


@pytest.mark.parametrize(
    ("first", "local", "indices"),
    [(0, 1, [0]), (0, 2, [0, 1]), (2, 2, [2, 3]), (1, 1, [1]), (0, 0, [])],
    ids=["one", "two", "second-host", "external", "no-engine-here"],
)
def test_engines_have_files_of_their_own(first, local, indices):
    """An engine's own process has the index of just this engine."""
    found = engines_here(config_of(first, local))
    assert found == {index: own_engine(config_of(index)) for index in indices}
    assert len(set(found.values())) == len(indices)


def test_a_page_has_every_engine_of_this_host_once(folder):
    files = [CounterFile(own_engine(config_of(index)), create=True) for index in (2, 3)]
    for number, file in enumerate(files):
        file.add("events", 5 + number)

    def lines(index, local):
        text = exposition(CollectorRegistry(), config_of(index, local), set())
        text = text.decode()
        return [line for line in text.splitlines() if "kvpolicy_events_total" in line]

    labels = 'kvpolicy_events_total{{engine="{}",model_name="tiny"}} {}.0'
    one, other = (labels.format(2 + number, 5 + number) for number in range(2))
    assert lines(2, 2)[-2:] == [one, other]
    assert len(lines(2, 2)) == 4, "help and type come once, not once per engine"
    assert lines(3, 2)[-1:] == [other], "engine 4 has not started"
    assert lines(0, 2) == []


def test_a_server_whose_engine_was_killed_leaves_no_file(folder):
    program = """
import subprocess, sys, tempfile
from vllm_kvpolicy.observe.shared_files import remove_stale_files_at_exit
tempfile.tempdir = sys.argv[1]
remove_stale_files_at_exit()
remove_stale_files_at_exit()
subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]], input=b"now")
assert list(__import__("pathlib").Path(sys.argv[1]).iterdir())
"""
    command = [sys.executable, "-c", program, str(folder), KILLED]
    assert subprocess.run(command).returncode == 0
    assert list(folder.iterdir()) == []
