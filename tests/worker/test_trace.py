"""The tracer follows true positions and writes down what it is given."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from support.made_events import BLOCK, FIRST, SECOND, made_batch
from support.made_traces import rows
from vllm_kvpolicy.observe.trace_files import EventRecord, read_trace, run_in, to_arrays
from vllm_kvpolicy.policies.base import Decision
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.observers.trace import Tracer


def record(tracer: Tracer, event: CompactEvent, survivors: list[list[int]]) -> None:
    """Record an event of two requests, which keeps one page of `survivors` per head.

    The policy chose the older survivor and the local token; notes of the second request
    are 100 larger.
    """
    keep = torch.zeros(2, 1, 2, 7, dtype=torch.bool)
    for head, kept in enumerate(survivors):
        keep[:, 0, head, [kept[0], 6]] = True
    larger = torch.tensor([0, 100])[:, None, None, None]
    notes = {
        "mass": torch.arange(14.0).double().view(1, 2, 7) + larger,
        "quotas": torch.tensor([[[1, 2], [3, 0]]]) + larger,
    }
    decision = Decision(keep, torch.zeros(2, 1, 2, 7), notes=notes)
    batch, destinations = made_batch(event, survivors, rows=(0, 1))
    tracer.record(batch, decision, destinations)


def two_events(folder: Path, max_bytes: int = 2**30) -> list[EventRecord]:
    """Return the records of two events of two requests."""
    tracer = Tracer(str(folder), BLOCK, lambda: None, max_bytes)
    record(tracer, FIRST, [[0, 1], [2, 5]])
    record(tracer, SECOND, [[1, 4], [0, 5]])
    return list(read_trace(folder))


def test_survivors_are_true_positions(tmp_path):
    first, _, second, other = two_events(tmp_path)
    assert np.array_equal(first.held, rows(range(7), range(7)))
    assert np.array_equal(first.survivors, rows([0, 1], [2, 5]))
    assert np.array_equal(first.selected, rows([0, 6], [2, 6]))
    # Positions 6 to 10 came since.
    assert np.array_equal(
        second.held, rows([0, 1, 6, 7, 8, 9, 10], [2, 5, 6, 7, 8, 9, 10])
    )
    assert np.array_equal(second.survivors, rows([1, 8], [2, 9]))
    assert np.array_equal(second.survivors, other.survivors)
    assert np.array_equal(second.selected, rows([1, 10], [2, 10]))


def test_the_rest_is_the_events(tmp_path):
    first, other, second, _ = two_events(tmp_path)
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert (first.frontier, second.frontier) == (6, 10)
    assert (first.request_id, other.request_id) == ("r0", "r1")
    assert first.policy == "ams-tova"
    assert (first.position, first.budget, first.prompt, first.sinks) == (7, 3, 6, 1)
    assert first.block_size == BLOCK
    # Both tokens of head 1 leave their pages; then all but its oldest token move.
    assert (first.moved, second.moved) == (0.5, 0.75)


def test_notes_are_kept_small(tmp_path):
    first, other, *_ = two_events(tmp_path)
    assert first.notes["mass"].dtype == np.float32
    assert np.array_equal(first.notes["mass"], np.arange(14).reshape(1, 2, 7))
    assert other.notes["quotas"].dtype == np.int32
    assert np.array_equal(other.notes["quotas"], [[[101, 102], [103, 100]]])


def test_two_servers_of_one_trace_do_not_mix(tmp_path):
    one, other = (Tracer(str(tmp_path), BLOCK, lambda: None) for _ in range(2))
    record(one, FIRST, [[0, 1], [2, 5]])
    record(other, FIRST, [[1, 4], [0, 5]])
    firsts = [next(read_trace(tracer.directory)) for tracer in (one, other)]
    assert [event.survivors.tolist() for event in firsts] == [
        [[[0, 1], [2, 5]]],
        [[[1, 4], [0, 5]]],
    ]
    with pytest.raises(ValueError, match="holds 2 runs"):
        list(read_trace(tmp_path))


def test_a_full_trace_ends_and_says_so_once(tmp_path, policy_log):
    first, *rest = two_events(tmp_path / "whole")
    assert len(rest) == 3
    assert policy_log.messages == [f"recording events in {run_in(tmp_path / 'whole')}"]
    policy_log.clear()
    size = sum(array.nbytes for array in to_arrays(first).values())
    assert len(two_events(tmp_path / "one", size)) == 1
    run = run_in(tmp_path / "one")
    assert policy_log.messages == [
        f"recording events in {run}",
        f"the trace in {run} is full after 1 events; later events are not recorded",
    ]
    with pytest.raises(ValueError, match="no events"):
        two_events(tmp_path / "none", size - 1)


def fill_disk(folder: Path) -> None:
    """Let the third record of a trace meet a full disk."""
    (folder / "000002.npz").symlink_to("/dev/full")


@pytest.mark.parametrize(
    ("lose", "reason", "left"),
    [(shutil.rmtree, "No such file", 0), (fill_disk, "No space left on device", 2)],
    ids=["folder deleted", "disk full"],
)
def test_a_trace_that_cannot_be_written_ends_and_serving_goes_on(
    tmp_path, policy_log, lose, reason, left
):
    told: list[str] = []
    tracer = Tracer(str(tmp_path), BLOCK, lambda: told.append("off"))
    record(tracer, FIRST, [[0, 1], [2, 5]])
    lose(tracer.directory)
    for _ in range(2):
        record(tracer, FIRST, [[0, 1], [2, 5]])
    said = [text for text in policy_log.messages if "cannot write" in text]
    assert len(said) == 1 and reason in said[0] and told == ["off"]
    assert len([*tmp_path.rglob("*.npz")]) == left, "none that was cut short"
