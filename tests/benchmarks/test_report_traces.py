"""What the report says of traces."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.report import traces
from support.report_data import event, write_run
from vllm_kvpolicy.policies.allocators.ams import AMSOptions, choose

SAME = [[[0, 1], [0, 1]], [[0, 1], [0, 1]]]
BUDGET, INTERVAL = 64, 32


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two events: layer 0 keeps the same tokens, layer 1 in one head none of them."""
    other = [[[0, 1], [0, 1]], [[0, 1], [50, 51]]]
    write_run(tmp_path / "trace", [event(40, 0, SAME), event(80, 1, other)])
    return tmp_path / "trace"


def ams_event(request: str, ordinal: int, layers: int = 1, heads: int = 2):
    """Return an event at which each head holds 10 tokens and keeps 5."""
    held, kept = (
        (list(range(10)), [0, 1, 4, 5, 9]),
        ([0, 1, 4, 5, 9, 10, 11, 12, 13, 14], [0, 4, 12, 13, 14]),
    )[ordinal]
    notes = {
        # The first two tokens of the second head have half of its mass.
        "mass": [[0.1] * 10, [0.25] * 2 + [0.0625] * 8],
        "segments": [[(0, 4), (4, 10), (10, 10)], [(0, 2), (2, 10), (10, 10)]],
        "quotas": [[1, 2, 0], [2, 1, 0]],
    }
    return event(
        10 + 5 * ordinal,
        ordinal,
        [[kept] * heads] * layers,
        request_id=request,
        policy="ams-tova",
        held=np.array([[held] * heads] * layers, np.int32),
        notes={n: np.array([rows[:heads]] * layers) for n, rows in notes.items()},
    )


def test_iou_is_taken_by_layer(trace):
    found = traces.read_policies(trace)
    assert found["tova"]["iou_by_layer"] == [1.0, 0.5]
    assert found["tova"]["iou"] == 0.75 and len(found["tova"]["retention"]) == 20
    assert found["tova"]["budgets"] == [2]
    assert "segments_of_heads" not in found["tova"]


def test_segments_are_those_of_the_last_two_events_of_the_longest_request(tmp_path):
    events = [ams_event("a", 0), ams_event("a", 1), ams_event("b", 0)]
    write_run(tmp_path, events)
    heads = traces.read_policies(tmp_path)["ams-tova"]["segments_of_heads"]
    places = [(each["ordinal"], each["head"]) for each in heads]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first = {"layer": 0, "head": 0, "ordinal": 0, "position": 10, "old": 0}
    first |= {"tokens": [4, 6], "mass": [0.4, 0.6], "quota": [1, 2], "chosen": [2, 3]}
    assert heads[0] == first
    # Of positions 0, 1, 4, 5, 9, 10 ... 14 those below 10 are old; 0, 4, 12, 13 and 14
    # are kept.
    last = heads[3]
    assert (last["position"], last["old"]) == (15, 5)
    assert (last["tokens"], last["mass"], last["chosen"]) == (
        [2, 8],
        [0.5, 0.5],
        [1, 4],
    )


def test_numbers_agree_with_what_ams_decides(tmp_path):
    config, torch_rng = AMSOptions(), torch.Generator().manual_seed(0)
    events = []
    for ordinal in range(2):
        count = BUDGET + INTERVAL
        position = count + INTERVAL * ordinal
        usage = torch.rand(2, count, generator=torch_rng) ** 4
        must = torch.zeros(2, count, dtype=torch.bool)
        must[:, :4] = must[:, -16:] = True
        lengths = torch.full((2,), count)
        made = choose(usage, usage, must, lengths, BUDGET, config, None)
        held = np.arange(position - count, position, dtype=np.int32)
        kept = [held[mask].tolist() for mask in made.keep.numpy()]
        notes = {
            name: getattr(made, name).numpy()[None]
            for name in ("mass", "segments", "quotas")
        }
        fields = {"policy": "ams-tova", "notes": notes}
        fields["held"] = np.broadcast_to(held, (1, 2, count))
        events.append(event(position, ordinal, [kept], **fields))
    write_run(tmp_path, events)
    for each in traces.read_policies(tmp_path)["ams-tova"]["segments_of_heads"]:
        assert sum(each["tokens"]) == BUDGET + INTERVAL
        assert sum(each["mass"]) == pytest.approx(1, abs=1e-3)
        assert sum(each["quota"]) == BUDGET - 20 and sum(each["chosen"]) == BUDGET
        free = np.array(each["chosen"]) - each["quota"]
        assert (free >= 0).all() and free[0] >= 4 and free.sum() == 20
