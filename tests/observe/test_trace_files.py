"""Records survive their files, and what is none is refused by name."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from support.made_traces import make_event, rows, write_trace
from vllm_kvpolicy.observe.trace_files import (
    EventRecord,
    new_run,
    read_trace,
    run_in,
    run_name,
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
    runs = [new_run(folder, run_name(engine)) for engine in range(20)]
    assert len(set(runs)) == 20 and all(run.parent == folder for run in runs)
    started, engines, _ = zip(*(run.name.split("-") for run in runs), strict=True)
    assert engines == tuple(f"engine{engine}" for engine in range(20))
    started = list(started)
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
    write_trace(first, [make_event()])  # events beside a run are a run, too
    inner = write_trace(new_run(first), [make_event()])
    with pytest.raises(ValueError, match=f"one of them: {first}, {inner}$"):
        run_in(first)


def test_an_absent_folder_is_not_called_empty(tmp_path):
    absent, file = tmp_path / "none", tmp_path / "file"
    file.touch()
    for path in (absent, file):
        with pytest.raises(ValueError, match=f"^trace: no such folder '{path}'$"):
            run_in(path)


def of_rank(width: int, **changes) -> EventRecord:
    """Return the event of a rank with one head of one layer."""
    held = np.arange(20 - width, 20)[None, None].astype(np.int32)
    fields = {"held": held, "selected": held[..., :2], "survivors": held[..., :1]}
    fields |= {"position": 20, "notes": {"mass": held.astype(np.float32)}}
    return make_event(**fields, **changes)


def test_ranks_are_read_as_one(tmp_path):
    name = run_name()
    for rank, moved in ((0, 0.25), (1, 0.75)):
        folder = new_run(tmp_path, f"{name}/rank-{rank}-of-2")
        write_trace(folder, [of_rank(3 + rank, moved=moved)])
    (event,) = read_trace(tmp_path)
    assert run_in(tmp_path) == tmp_path / name
    assert event.held.tolist() == [[[17, 18, 19, -1], [16, 17, 18, 19]]]
    assert event.selected.tolist() == [[[17, 18], [16, 17]]]
    assert event.survivors.tolist() == [[[17], [16]]]
    assert event.notes["mass"].tolist() == [[[17, 18, 19, 0], [16, 17, 18, 19]]]
    assert event.moved == 0.5 and event.ranks == 2
    # One rank by itself.
    (half,) = read_trace(tmp_path / name / "rank-1-of-2")
    assert half.held.tolist() == [[[16, 17, 18, 19]]]


def test_events_that_one_rank_has_not_recorded_are_left_out(tmp_path):
    events = [make_event(ordinal=ordinal) for ordinal in range(3)]
    for rank, count in ((0, 3), (1, 2)):
        write_trace(new_run(tmp_path, f"run/rank-{rank}-of-2"), events[:count])
    assert [event.ordinal for event in read_trace(tmp_path)] == [0, 1]


def test_ranks_that_part_are_refused(tmp_path):
    for rank in range(2):
        folder = new_run(tmp_path, f"run/rank-{rank}-of-2")
        held = rows(range(100 + rank))
        write_trace(folder, [make_event(position=100 + rank, held=held)])
    with pytest.raises(ValueError, match="different events under one number: r0 at"):
        list(read_trace(tmp_path))


@pytest.mark.parametrize("of", [2, 10**15])
def test_a_missing_rank_is_said(tmp_path, of):
    write_trace(new_run(tmp_path, f"run/rank-1-of-{of}"), [make_event()])
    told = rf"heads of ranks \[1\], expected all of {of}"
    with pytest.raises(ValueError, match=told):
        list(read_trace(tmp_path / "run"))
