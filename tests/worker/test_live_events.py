"""What workers tell of events, from made batches; see also test_trace."""

import tempfile
from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest

from support.made_events import BLOCK, FIRST, SECOND, made_batch
from vllm_kvpolicy.observe import shared_files as ring
from vllm_kvpolicy.observe.shared_files import RANK, Ring
from vllm_kvpolicy.worker.observers.live import MOST_SECONDS, SHARE, LiveEvents, in_bins
from vllm_kvpolicy.worker.observers.positions import UNKNOWN, Followed, TruePositions


@pytest.fixture
def told(tmp_path, monkeypatch):
    """A worker, and its ring as a listener sees it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    worker = LiveEvents("one", 0, 1, BLOCK, (1, 2), True, lambda: None)
    return worker, Ring(RANK.format("one", 0), create=False)


def test_nothing_is_told_or_followed_while_nobody_listens(told, monkeypatch):
    worker, listener = told
    monkeypatch.setattr(worker.positions, "follow", None)  # a call would fail
    worker.tell(*made_batch(FIRST, [[0, 1], [2, 5]]))
    assert listener.read() == ([], 0)


def test_an_event_is_told_by_true_positions(told):
    worker, listener = told
    listener.listen()
    worker.tell(*made_batch(FIRST, [[0, 1], [2, 5]]))
    worker.tell(*made_batch(SECOND, [[1, 3], [0, 6]]))
    (first, second), _ = listener.read()
    assert (first["kept"], first["held"]) == ([[3, 3]], 7)
    shares = [each / 255 for each in b64decode(first["share"])]
    assert np.round(shares, 1).tolist() == [0.5, 0.5, 0.5, 0, 0, 0.5, 1]
    # Positions 0, 1, 6 and so on of head 0, and 2, 5, 6 and so on of head 1.
    shares = [each / 255 for each in b64decode(second["share"])]
    assert np.round(shares, 1).tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, 0.5, 0, 0, 1.0 / 1]
    assert second["first_known"] == 0 and second["position"] == 11


def test_retention_and_age_follow_from_the_shares(told):
    worker, listener = told
    listener.listen()
    worker.tell(*made_batch(FIRST, [[0, 1], [2, 5]]))
    ((record,), _) = listener.read()
    # Ages 7, 6 and 1 of head 0; 5, 2 and 1 of head 1; of 7 tokens.
    assert record["age"] == [[round(14 / 21, 3), round(8 / 21, 3)]]
    assert record["retention"] == [0.5, 0.5, 0.5, 0, 0, 0.5, 1]


def test_long_texts_are_told_in_64_parts():
    share = np.arange(1000) / 1000
    means = in_bins(share)
    assert len(means) == 64
    assert means[[0, -1]] == pytest.approx([share[:16].mean(), share[-15:].mean()])


def test_survivors_from_before_somebody_listened_are_a_mean(told, monkeypatch):
    worker, listener = told
    worker.tell(*made_batch(FIRST, [[0, 1], [2, 5]]))
    listener.listen()
    worker.tell(*made_batch(SECOND, [[1, 3], [0, 6]]))
    ((record,), _) = listener.read()
    assert record["first_known"] == 6  # the frontier of the first event
    shares = [each / 255 for each in b64decode(record["share"])]
    # One of two survivors of each head is older: 2 of 12 (head, token) pairs.
    assert shares[:6] == pytest.approx([2 / 12] * 6, abs=1 / 255)
    assert np.round(shares[6:], 1).tolist() == [0, 0.5, 0, 0, 1]
    # A gap in listening makes what was known old.
    now = ring.time.monotonic()
    monkeypatch.setattr(ring.time, "monotonic", lambda: now + 60)
    worker.tell(*made_batch(SECOND, [[1, 3], [0, 6]]))
    assert worker.positions._known == {}


def test_telling_takes_a_bounded_share_of_the_time(told, monkeypatch):
    worker, listener = told
    now = ring.time.monotonic()
    monkeypatch.setattr(ring.time, "monotonic", lambda: now)
    summary = worker._summary

    def slowly(*given):
        nonlocal now
        now += 2 * MOST_SECONDS
        return summary(*given)

    monkeypatch.setattr(worker, "_summary", slowly)
    listener.listen()
    worker.tell(*made_batch(FIRST, [[0, 1], [2, 5]]))
    worker.tell(*made_batch(SECOND, [[1, 3], [0, 6]]))  # left out
    assert len(listener.read()[0]) == 1 and worker.positions._known == {}
    now += MOST_SECONDS / SHARE
    listener.listen()
    worker.tell(*made_batch(SECOND, [[1, 3], [0, 6]]))
    first, second = listener.read()[0]
    assert (first["first_known"], second["first_known"]) == (0, 6)


def test_an_error_of_what_is_shown_does_not_stop_the_worker(
    told, monkeypatch, policy_log
):
    worker, listener = told
    listener.listen()
    monkeypatch.setattr(worker.positions, "follow", None)
    for _ in range(3):
        worker.tell(*made_batch(FIRST, [[0, 1], [2, 5]]))
    assert policy_log.messages == ["LiveEvents is off from here on; serving goes on"]


def test_a_restarted_request_is_followed_from_its_start():
    positions = TruePositions(BLOCK)
    follow = positions.follow
    (first,) = follow(*made_batch(FIRST, [[0, 1], [2, 5]]))
    (again,) = follow(*made_batch(FIRST, [[3, 4], [0, 5]]))
    assert isinstance(again, Followed)
    assert again.survivors.tolist() == [[3, 4], [0, 5]]
    assert again.held.tolist() == first.held.tolist() == [list(range(7))] * 2


def test_unknown_survivors_stay_unknown():
    positions = TruePositions(BLOCK)
    (seen,) = positions.follow(*made_batch(SECOND, [[0, 1], [2, 5]]))
    assert seen.survivors.tolist() == [[UNKNOWN, UNKNOWN], [6, 9]]
    third = replace(
        SECOND, ordinal=2, position=15, frontier_blocks=7, source_blocks=(1, 6, 7)
    )
    (seen,) = positions.follow(*made_batch(third, [[0, 2], [0, 1]]))
    assert seen.survivors.tolist() == [[UNKNOWN, 10], [6, 9]]
    assert seen.first_known == 6
