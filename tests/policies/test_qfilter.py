"""Q-Filters: projections written as loops, each layer and head on its own filter."""

from itertools import product

import pytest
import torch

from support import event_inputs as events
from support.calibration_files import make_calibration
from vllm_kvpolicy.policies.scorers.qfilter import QFilterScorer


def scorer(num_layers: int = events.LAYERS) -> QFilterScorer:
    sizes = (num_layers, events.HEADS, events.GROUP, events.SIZE)
    return QFilterScorer(make_calibration("qfilter", *sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_loops(dtype: torch.dtype) -> None:
    made = scorer()
    inputs = events.make_inputs(made.needs, dtype=dtype)
    got = made.score(inputs, None)
    assert got.dtype == torch.float32 and got.shape == inputs.must_keep.shape
    for e, layer, head in product(*map(range, inputs.lengths.shape)):
        along = made.filters[layer, head].tolist()
        for t in range(inputs.lengths[e, layer, head]):
            key = inputs.keys[e, layer, head, t].tolist()
            want = -sum(f * k for f, k in zip(along, key, strict=True))
            assert got[e, layer, head, t].item() == pytest.approx(want, abs=1e-5)


def test_filters_of_another_number_of_layers() -> None:
    made = scorer(num_layers=events.LAYERS + 1)
    with pytest.raises(RuntimeError, match="expand"):
        made.score(events.make_inputs(made.needs), None)
