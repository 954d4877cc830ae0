"""Records survive their files, and what is none is refused by name."""

import numpy as np
import pytest
from made_traces import make_event, write_trace

from vllm_kvpolicy.trace_files import read_event, read_trace, to_arrays


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


def test_a_folder_without_events_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"^trace: no events in '{tmp_path}'$"):
        list(read_trace(tmp_path))


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
    with pytest.raises(ValueError, match=r"differ in \['held'\]"):
        list(read_trace(tmp_path))
