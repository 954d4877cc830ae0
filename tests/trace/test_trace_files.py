"""Records survive their files, and what is none is refused by name."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from support.made_traces import make_event, write_trace
from vllm_kvpolicy.trace.files import (
    new_run,
    read_event,
    read_trace,
    run_in,
    to_arrays,
)


def test_records_come_back_in_order(tmp_path):
    notes = {"mass": np.ones((1, 1, 10), np.float32)}
    events = [make_event(ordinal=ordinal, notes=notes) for ordinal in range(12)]
    got = list(read_trace(write_trace(tmp_path, events)))
    assert [event.ordinal for event in got] == list(range(12))
    for name, value in to_arrays(got[3]).items():
        expected = to_arrays(events[3])[name]
        assert value.dtype == expected.dtype and np.array_equal(value, expected), name
    assert isinstance(got[0].request_id, str) and isinstance(got[0].position, int)
    assert list(got[0].notes) == ["mass"]


def test_runs_of_one_moment_have_folders_of_their_own(tmp_path):
    folder = tmp_path / "new" / "trace"
    before = datetime.now(UTC)
    runs = [new_run(folder) for _ in range(20)]
    assert len(set(runs)) == 20 and all(run.parent == folder for run in runs)
    started = [run.name.rpartition("-")[0] for run in runs]
    assert started == sorted(started)
    first = datetime.strptime(started[0], "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC)
    assert timedelta() <= first - before < timedelta(seconds=5)


def test_the_only_run_with_events_is_read(tmp_path):
    early, run, late = (new_run(tmp_path) for _ in range(3))
    write_trace(run, [make_event()])
    (tmp_path / "plots").mkdir()
    for folder in (tmp_path, run):
        assert run_in(folder) == run
        assert [event.request_id for event in read_trace(folder)] == ["r0"]
    for folder in (early, late):
        with pytest.raises(ValueError, match=f"^trace: no events in '{folder}';"):
            run_in(folder)


def test_of_several_runs_one_is_to_be_named(tmp_path):
    first, second = (write_trace(new_run(tmp_path), [make_event()]) for _ in range(2))
    with pytest.raises(ValueError) as refused:
        list(read_trace(tmp_path))
    assert str(refused.value) == (
        f"trace: '{tmp_path}' holds 2 runs, name one of them: {first}, {second}"
    )
    assert run_in(second) == second


def test_events_beside_a_run_are_a_run_too(tmp_path):
    write_trace(tmp_path, [make_event()])
    assert run_in(tmp_path) == tmp_path
    run = write_trace(new_run(tmp_path), [make_event()])
    with pytest.raises(ValueError, match=f"one of them: {tmp_path}, {run}$"):
        run_in(tmp_path)


def test_an_absent_folder_is_not_called_empty(tmp_path):
    absent, file = tmp_path / "none", tmp_path / "file"
    file.touch()
    for path in (absent, file):
        with pytest.raises(ValueError, match=f"^trace: no such folder '{path}'$"):
            run_in(path)


def test_broken_files_are_refused(tmp_path):
    path = write_trace(tmp_path, [make_event()]) / "000000.npz"
    whole = path.read_bytes()
    for content in (b"", b"no archive", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^trace: cannot read '{path}'"):
            read_event(path)


def test_files_of_other_releases_are_refused(tmp_path):
    arrays = to_arrays(make_event())
    del arrays["held"]
    np.savez(tmp_path / "000000.npz", **arrays)
    with pytest.raises(ValueError, match=r"fields differ: \['held'\]"):
        list(read_trace(tmp_path))
