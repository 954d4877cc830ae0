"""Scorers against their formulas written as loops, on heads of different lengths."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from support import event_inputs
from support.calibration_files import make_calibration
from support.words import built
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.compose import measure_usage
from vllm_kvpolicy.policies.names import SCORERS
from vllm_kvpolicy.policies.scorers.expected import turn_ahead
from vllm_kvpolicy.policies.scorers.h2o import H2OScorer
from vllm_kvpolicy.policies.scorers.keydiff import KeyDiffScorer
from vllm_kvpolicy.policies.scorers.lagkv import LagKVScorer
from vllm_kvpolicy.policies.scorers.qfilter import QFilterScorer
from vllm_kvpolicy.policies.scorers.random import RandomScorer, mix
from vllm_kvpolicy.policies.scorers.rpc import RPCScorer
from vllm_kvpolicy.policies.scorers.tova import TovaScorer
from vllm_kvpolicy.policies.words import BaseScorer

HEADS, GROUP, SIZE = event_inputs.HEADS, event_inputs.GROUP, event_inputs.SIZE
SCALE = SIZE**-0.5
# Short rows make loops fast; one is shorter than the windows used here.
LENGTHS = (((40, 31), (25, 40)), ((33, 4), (33, 33)))
WIDTH = 40
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


def make_inputs(scorer: BaseScorer, sinks: int = 3) -> EventInputs:
    return event_inputs.make_inputs(
        scorer.needs, lengths=LENGTHS, local=(6, 2), width=WIDTH, sinks=sinks
    )


def score(scorer: BaseScorer, inputs: EventInputs) -> Tensor:
    usage = measure_usage(scorer.needs, inputs)
    got = scorer.score(inputs, usage)
    assert got.shape == inputs.must_keep.shape and got.dtype == torch.float32
    return got


def rows(inputs: EventInputs) -> Iterator[tuple[int, int, int, int]]:
    """Yield event, layer, KV head and its length."""
    for e, layers in enumerate(inputs.lengths.tolist()):
        for layer, heads in enumerate(layers):
            for head, length in enumerate(heads):
                yield e, layer, head, length


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits - logits.max())
    return weight / weight.sum()


def window_probs(inputs: EventInputs, *at: int) -> np.ndarray:
    """Causal attention [G, W, length] of the queries of one KV head."""
    window = inputs.queries.shape[-2]
    return event_inputs.window_logits(inputs, at, window).softmax(-1).numpy()


def pooled(row: np.ndarray, kernel: int) -> np.ndarray:
    half = kernel // 2
    padded = np.pad(row, half)
    return np.array([padded[i : i + kernel].sum() / kernel for i in range(len(row))])


def test_tova_is_one_row_for_all_heads() -> None:
    scorer = built(TovaScorer)
    inputs = make_inputs(scorer)
    got = score(scorer, inputs)
    for e in range(2):
        for layer in range(2):
            want = np.zeros(WIDTH)
            for head in range(HEADS):
                last = window_probs(inputs, e, layer, head)[:, -1].sum(0)
                want[: len(last)] += last / (HEADS * GROUP)
            for head in range(HEADS):
                n = int(inputs.lengths[e, layer, head])
                expected = want[:n].copy()
                expected[-1] = want.max()
                np.testing.assert_allclose(
                    got[e, layer, head, :n], expected, **TOLERANCE
                )


def test_h2o_adds_to_what_tokens_had() -> None:
    scorer = built(H2OScorer, window=6)
    inputs = make_inputs(scorer)
    got = score(scorer, inputs)
    for e, layer, head, n in rows(inputs):
        want = inputs.memory["h2o"][e, layer, head, :n].double().numpy()
        want = want + window_probs(inputs, e, layer, head).sum((0, 1))
        np.testing.assert_allclose(got[e, layer, head, :n], want, **TOLERANCE)
    assert scorer.remember(got)["h2o"] is got


@pytest.mark.parametrize(("window", "kernel"), [(6, 3), (9, 7)])
@pytest.mark.parametrize("sinks", [0, 3])
def test_rpc(window: int, kernel: int, sinks: int) -> None:
    scorer = built(RPCScorer, rpc_window=window, rpc_kernel=kernel)
    inputs = make_inputs(scorer, sinks)
    got = score(scorer, inputs)
    received = np.zeros((*inputs.keys.shape[:2], WIDTH))
    for e, layer, head, n in rows(inputs):
        used = min(window, max(n - 1, 1))
        older = slice(leading(inputs, e, layer, head), n - used)
        keys = inputs.keys[e, layer, head, older].double().numpy()
        for g in range(GROUP if len(keys) else 0):
            for w in range(window - used, window):
                query = inputs.queries[e, layer, head * GROUP + g, w].double().numpy()
                received[e, layer, older] += softmax(keys @ query * SCALE)
    for e, layer, head, n in rows(inputs):
        used = min(window, max(n - 1, 1))
        older = slice(leading(inputs, e, layer, head), n - used)
        mean = pooled(received[e, layer, older] / (HEADS * GROUP), kernel)
        row = got[e, layer, head]
        np.testing.assert_allclose(row[older], mean, **TOLERANCE)
        if len(mean):
            assert (row[: older.start] == row[older].max()).all()
            assert (row[older.stop : n] == row[older].max()).all()


def leading(inputs: EventInputs, e: int, layer: int, head: int) -> int:
    must = inputs.must_keep[e, layer, head].tolist()
    return must.index(False) if False in must else len(must)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_turning_ahead_is_the_mean_of_turns(count: int) -> None:
    """Seven queries before `count` positions, each turned to each."""
    rope = Rope.from_theta(1e4, SIZE)
    cos, sin = turn_ahead(rope, 7, count, torch.device("cpu"))
    ahead = torch.arange(7, 0, -1)[:, None] + torch.arange(count)
    angle = ahead[..., None] * rope.inv_freq.flatten()
    want = angle.cos().mean(1), angle.sin().mean(1)
    torch.testing.assert_close(cos[0], want[0].repeat(1, 2).float())
    torch.testing.assert_close(sin[0], torch.cat([-want[1], want[1]], -1).float())


def test_epsilon_counts_as_attention() -> None:
    """Of a token whose values are twice as long it adds twice as much."""
    scores = []
    for epsilon in (0.0, 0.05):
        scorer = built(SCORERS["expected"], expected_window=7, epsilon=epsilon)
        inputs = make_inputs(scorer)
        scores.append(score(scorer, inputs))
    held = torch.arange(WIDTH) < inputs.lengths[..., None]
    measured = held & ~inputs.must_keep
    norms = inputs.values.norm(dim=-1)[measured]
    more = (scores[1] - scores[0])[measured]
    torch.testing.assert_close(more, 0.05 * norms, rtol=1e-4, atol=1e-6)


def test_expected_attention_ignores_queries_before_the_first_token() -> None:
    scorer = built(SCORERS["expected"], expected_window=7, n_future=20)
    inputs = make_inputs(scorer)
    inputs.end[0] = 4
    inputs.queries[0, :, :, :3] = torch.nan
    short = score(scorer, inputs)
    assert torch.isfinite(short[inputs.valid]).all()
    four = built(SCORERS["expected"], expected_window=4, n_future=20)
    torch.testing.assert_close(short[:1], score_newest(four, inputs)[:1])


# Neighbours, the last of whose pairs stay, scaled as LongRoPE does; and no rotation.
KINDS = Rope(
    torch.tensor([[1.0, 0.1, 0.01, 0.0], [0.0] * 4], dtype=torch.float64),
    torch.tensor([[1.2, 1.2, 1.2, 1.0], [1.0] * 4], dtype=torch.float64),
    torch.tensor([0, 1]),
    torch.tensor([[0, 2, 4, 6, 1, 3, 5, 7], list(range(8))]),
)


def test_expected_attention_of_layers_that_rotate_in_other_ways() -> None:
    """Each layer as if all rotated like it, its pairs half a head apart."""
    scorer = built(SCORERS["expected"], expected_window=7, n_future=20)
    inputs = replace(make_inputs(scorer), rope=KINDS)
    got = score(scorer, inputs)
    for layer, (frequency, order) in enumerate(
        zip(KINDS.inv_freq, KINDS.order, strict=True)
    ):
        halves = replace(
            inputs,
            rope=Rope(frequency),
            keys=inputs.keys[..., order],
            queries=inputs.queries[..., order],
        )
        want = score(scorer, halves)[:, layer]
        np.testing.assert_allclose(got[:, layer], want, **TOLERANCE)
    still = score(scorer, halves)  # all layers rest
    assert not torch.allclose(got[:, 0], still[:, 0])


def score_newest(scorer: BaseScorer, inputs: EventInputs) -> Tensor:
    """Score with more queries given than asked for."""
    assert inputs.queries.shape[-2] > scorer.needs.window_tokens
    return scorer.score(inputs, None)


def test_lagkv_channels_that_do_not_vary_say_nothing() -> None:
    scorer = built(LagKVScorer, lag=5, cross=True)
    inputs = make_inputs(scorer)
    inputs.values[..., 3] = 1.0
    got = score(scorer, inputs)[inputs.valid]
    assert torch.isfinite(got).all()
    inputs.values[..., 3] = 2.0
    assert torch.equal(score(scorer, inputs)[inputs.valid], got)


def lowbias32(value: int) -> int:
    """The published hash of one 32-bit number."""
    value ^= value >> 16
    value = value * 0x7FEB352D % 2**32
    value ^= value >> 15
    value = value * 0x846CA68B % 2**32
    return value ^ value >> 16


def test_the_hash_is_the_published_function() -> None:
    values = [0, 1, 2, 12345, 2**31, 2**32 - 1]
    assert mix(torch.tensor(values)).tolist() == [lowbias32(v) for v in values]
    high_and_negative = torch.tensor([5, 5 + 2**32, 5 + 2**40, -7, -(2**40)])
    assert len(mix(high_and_negative).unique()) == 5


def test_random_draws_for_each_token_event_and_seed() -> None:
    inputs = make_inputs(built(RandomScorer, seed=0))
    got = score(built(RandomScorer, seed=0), inputs)
    assert (got >= 0).all() and (got < 1).all()
    assert len(got.unique()) > 0.99 * got.numel()
    assert abs(float(got.mean()) - 0.5) < 0.05
    assert torch.equal(score(built(RandomScorer, seed=0), inputs), got)
    other = score(built(RandomScorer, seed=1), inputs)
    assert (other == got).float().mean() < 0.01
    inputs.end[0] += 1
    later = score(built(RandomScorer, seed=0), inputs)
    assert (later[0] == got[0]).float().mean() < 0.01
    assert torch.equal(later[1], got[1])


@pytest.mark.parametrize(
    ("scorer", "field"),
    [
        (built(KeyDiffScorer), "keys"),
        (built(SCORERS["lagkv"]), "values"),
        (built(SCORERS["rpc"]), "queries"),
        (built(SCORERS["expected"]), "rope"),
    ],
)
def test_missing_inputs_are_errors(scorer: BaseScorer, field: str) -> None:
    without = replace(make_inputs(scorer), **{field: None})
    said = f"{field}: got None, but this policy needs it"
    with pytest.raises(ValueError, match=said):
        scorer.score(without, None)
    with pytest.raises(ValueError, match="usage: expected"):
        built(TovaScorer).score(make_inputs(built(TovaScorer)), None)


# -- Q-Filters: each layer and head on its own filter ----------------------------------


def qfilter(num_layers: int = event_inputs.LAYERS) -> QFilterScorer:
    sizes = (num_layers, event_inputs.HEADS, event_inputs.GROUP, event_inputs.SIZE)
    return QFilterScorer(make_calibration("qfilter", *sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_loops(dtype: torch.dtype) -> None:
    made = qfilter()
    inputs = event_inputs.make_inputs(made.needs, dtype=dtype)
    got = made.score(inputs, None)
    assert got.dtype == torch.float32 and got.shape == inputs.must_keep.shape
    for e, layer, head in product(*map(range, inputs.lengths.shape)):
        along = made.filters[layer, head].tolist()
        for t in range(inputs.lengths[e, layer, head]):
            key = inputs.keys[e, layer, head, t].tolist()
            want = -sum(f * k for f, k in zip(along, key, strict=True))
            assert got[e, layer, head, t].item() == pytest.approx(want, abs=1e-5)


def test_filters_of_another_number_of_layers() -> None:
    made = qfilter(num_layers=event_inputs.LAYERS + 1)
    with pytest.raises(RuntimeError, match="expand"):
        made.score(event_inputs.make_inputs(made.needs), None)
