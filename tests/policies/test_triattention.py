"""TriAttention as its definition: keys turned back, scored at each distance."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support import event_inputs as events
from support.calibration_files import make_calibration
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.scorers.triattention import TriAttentionScorer, standardised

DISTANCES = [2**n for n in range(17)]


def scorer(aggregate: str = "max") -> TriAttentionScorer:
    sizes = (events.LAYERS, events.HEADS, events.GROUP, events.SIZE)
    made = make_calibration("triattention", *sizes)
    return TriAttentionScorer(made, aggregate)


def make_inputs(scaling: float = 1.0) -> EventInputs:
    inputs = events.make_inputs(Needs(keys=True, positions=True, rope=True))
    rope = Rope(inputs.rope.inv_freq, scaling)
    return replace(inputs, rope=rope, keys=inputs.keys * scaling)


def by_definition(made: TriAttentionScorer, inputs: EventInputs) -> Tensor:
    """Scores [E, L, Hq, T] in float64."""
    stored = made.calibration.tensors
    query = torch.complex(stored["query_real"], stored["query_imag"])
    query = query.to(torch.complex128)[:, :, None]  # [L, Hq, 1, F]
    plain = inputs.rope.unrotate(inputs.keys, inputs.positions)
    plain = plain.double().repeat_interleave(events.GROUP, 2)
    key = torch.complex(*plain.chunk(2, -1))
    position = inputs.positions.repeat_interleave(events.GROUP, 2)
    phase = (query * key.conj()).angle()
    score = torch.zeros_like(position, dtype=torch.float64)
    for distance in DISTANCES:
        ahead = inputs.end[:, None, None, None] + distance - position
        wave = torch.cos(ahead[..., None] * inputs.rope.inv_freq + phase)
        score += (query.abs() * key.abs() * wave).sum(-1) / len(DISTANCES)
    spread = stored["query_abs"][:, :, None] - query.abs()
    return inputs.rope.scaling**2 * (score + (spread * key.abs()).sum(-1))


@pytest.mark.parametrize("scaling", [1.0, 1.4])
def test_equals_the_definition(scaling: float) -> None:
    made, inputs = scorer(), make_inputs(scaling)
    got = made.per_query_head(inputs)
    want = by_definition(made, inputs)
    valid = inputs.valid.repeat_interleave(events.GROUP, 2)
    assert got.dtype == torch.float32
    assert (got - want)[valid].abs().max() < 2e-4 < want[valid].std() / 100


def test_layers_may_rotate_in_other_ways() -> None:
    """Each layer as if all rotated like it."""
    made, inputs = scorer(), make_inputs()
    frequency = torch.stack([inputs.rope.inv_freq, torch.zeros(events.SIZE // 2)])
    scaling = torch.tensor([[1.4], [1.0]]).expand(frequency.shape).double()
    kinds = Rope(frequency, scaling, torch.tensor([0, 1]))
    got = made.per_query_head(replace(inputs, rope=kinds))
    for layer in range(events.LAYERS):
        rope = Rope(frequency[layer], float(scaling[layer, 0]))
        want = made.per_query_head(replace(inputs, rope=rope))[:, layer]
        torch.testing.assert_close(got[:, layer], want)


def test_equal_scores_and_rows_of_sinks_stay_finite() -> None:
    score = torch.full((2, 6), 3.0)
    counted = torch.tensor([[True] * 6, [False] * 6])
    got = standardised(score, counted)
    assert (got[0] == 0).all() and got.isfinite().all()
