"""Scorers and allocators against what kvpress computed, see tests/golden/README.md."""

import numpy as np
import pytest
import torch
from torch import Tensor

from support.golden import Golden
from support.words import built
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.allocators.adakv import AdaKVAllocator
from vllm_kvpolicy.policies.allocators.chunk import ChunkAllocator
from vllm_kvpolicy.policies.allocators.pyramid import layer_budgets
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.compose import measure_usage
from vllm_kvpolicy.policies.names import SCORERS
from vllm_kvpolicy.policies.scorers.keydiff import KeyDiffScorer
from vllm_kvpolicy.policies.scorers.knorm import KnormScorer
from vllm_kvpolicy.policies.scorers.lagkv import LagKVScorer
from vllm_kvpolicy.policies.scorers.streaming import StreamingScorer
from vllm_kvpolicy.policies.scorers.tova import TovaScorer
from vllm_kvpolicy.policies.words import BaseScorer

GOLDEN = "scorers_kvpress"

SINKS = 4
# What kvpress gives all tokens, where no position is protected or all are scored.
WHOLE_ROW = {
    "keydiff": built(KeyDiffScorer),
    "knorm": built(KnormScorer),
    "lagkv_lag128": built(SCORERS["lagkv"]),
    "lagkv_lag32": built(LagKVScorer, lag=32, cross=False),
    "lagkv_lag32_cross": built(LagKVScorer, lag=32, cross=True),
}
# kvpress' variants of Expected Attention as options.
EXPECTED = {
    "expected": {},
    "expected_nocov": {"covariance": False},
    "expected_novnorm": {"value_norm": False},
    "expected_kvpress_default": {"epsilon": 0.0},
}


@pytest.fixture(
    params=[
        f"{layer}_T{tokens}_"
        for layer in ("llama", "qwen2", "qwen3")
        for tokens in (96, 257)
    ]
)
def prefix(request: pytest.FixtureRequest) -> str:
    return request.param


def event(
    data: Golden, prefix: str, queries: Tensor | None = None, end: int | None = None
) -> EventInputs:
    """All tokens of one layer; the first 4 are sinks."""
    keys = torch.from_numpy(data[prefix + "k"])[None, None]
    values = torch.from_numpy(data[prefix + "v"])[None, None]
    rows = keys.shape[:-1]
    theta = float(data.get(prefix + "rope_theta", 1e4))
    return EventInputs(
        lengths=torch.full(rows[:3], rows[3]),
        must_keep=(torch.arange(rows[3]) < SINKS).expand(rows),
        end=torch.tensor([end or rows[3]]),
        scale=keys.shape[-1] ** -0.5,
        keys=keys,
        values=values,
        queries=None if queries is None else queries[None, None],
        rope=Rope.from_theta(theta, keys.shape[-1]),
    )


def score(scorer: BaseScorer, inputs: EventInputs) -> np.ndarray:
    usage = measure_usage(scorer.needs, inputs)
    return scorer.score(inputs, usage)[0, 0].numpy()


def check_close(got: np.ndarray, want: np.ndarray) -> None:
    highest = max(1.0, float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6 * highest)


@pytest.mark.parametrize("name", WHOLE_ROW)
def test_scores_without_queries(golden: Golden, prefix: str, name: str) -> None:
    got = score(WHOLE_ROW[name], event(golden, prefix))
    check_close(got, golden[f"{prefix}score_{name}"])


@pytest.mark.parametrize("case", [0, 1])
def test_lagkv_over_several_blocks(golden: Golden, case: int) -> None:
    inputs = event(golden, f"lagkvx{case}_")
    ranked = score(built(SCORERS["lagkv"]), inputs)
    np.testing.assert_array_equal(ranked, golden[f"lagkvx{case}_score"])
    check_close(
        score(built(LagKVScorer, lag=128, cross=True), inputs),
        golden[f"lagkvx{case}_cross"],
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_expected_attention(golden: Golden, prefix: str, name: str) -> None:
    # kvpress takes all queries but the first four, and knows the position right.
    queries = torch.from_numpy(golden[prefix + "q"])
    scorer = built(
        SCORERS["expected"], expected_window=queries.shape[1] - 4, **EXPECTED[name]
    )
    got = score(scorer, event(golden, prefix, queries))
    check_close(got[:, SINKS:], golden[f"{prefix}score_{name}"][:, SINKS:])
    highest = got[:, SINKS:].max(-1, keepdims=True)
    assert (got[:, :SINKS] == highest).all()


def test_expected_attention_from_a_buffer(golden: Golden, prefix: str) -> None:
    # From 48 buffered queries kvpress takes the last 44, and believes the next position
    # to be 48. So they are given as they would stand before that position.
    before = torch.from_numpy(golden[prefix + "q_prerope"])[:, -44:]
    rope = event(golden, prefix).given("rope")
    queries = rope.unrotate(before, -torch.arange(4, 48))
    expected = built(SCORERS["expected"], expected_window=44)
    got = score(expected, event(golden, prefix, queries, end=48))
    want = golden[f"{prefix}score_expected_buf48"]
    check_close(got[:, SINKS:], want[:, SINKS:])


@pytest.mark.parametrize("window", [1, 32, 64])
def test_window_attention(golden: Golden, prefix: str, window: int) -> None:
    name = "tova" if window == 1 else f"snapkv_w{window}"
    scorer = (
        built(TovaScorer) if window == 1 else built(SCORERS["snapkv"], window=window)
    )
    got = score(scorer, event(golden, prefix, torch.from_numpy(golden[prefix + "q"])))
    check_close(got[:, :-window], golden[f"{prefix}score_{name}"][:, :-window])
    # kvpress protects the newest with the maximum over all heads plus 1, we per head.
    highest = got[:, :-window].max(-1, keepdims=True)
    if window > 1:
        assert (got[:, -window:] == highest).all()
    assert (got[:, -1:] >= highest).all()


@pytest.mark.parametrize("dropped", [50, 75])
def test_streaming_keeps_the_same_tokens(
    golden: Golden, prefix: str, dropped: int
) -> None:
    inputs = event(golden, prefix)
    got = score(built(StreamingScorer), inputs)
    got = np.where(inputs.must_keep[0, 0].numpy(), np.inf, got)
    want = golden[f"{prefix}score_streaming_r{dropped}"] == 1
    for row, kept in zip(got, want, strict=True):
        best = np.sort(np.argsort(row)[::-1][: kept.sum()])
        np.testing.assert_array_equal(best, np.flatnonzero(kept))


# -- selections and budgets, index for index -------------------------------------------

CHUNK_CASES, ADAKV_CASES, PYRAMID_CASES = 48, 33, 96


def cases(golden: Golden, kind: str) -> list[tuple[str, str, str]]:
    """Names of the selections, of the scores they came from, and their settings."""
    found = []
    for name in golden:
        prefix, is_kind, rest = name.partition(f"_{kind}_")
        if is_kind:
            scorer, _, settings = rest.partition("_c" if kind == "chunkkv" else "_r")
            found.append((name, f"{prefix}_score_{scorer}", settings))
    return found


def layer_of(score: np.ndarray) -> tuple[Tensor, EventInputs]:
    """Scores [1, 1, H, T] of one layer and an event that nothing must be kept of."""
    rows = torch.from_numpy(score)[None, None]
    held = torch.full(rows.shape[:3], rows.shape[3])
    nothing = torch.zeros_like(rows, dtype=torch.bool)
    return rows, EventInputs(held, nothing, held[:, 0, 0], 1.0)


def test_whole_chunks(golden: Golden) -> None:
    found = cases(golden, "chunkkv")
    assert len(found) == CHUNK_CASES
    for name, score, settings in found:
        rows, inputs = layer_of(golden[score])
        length = int(settings.partition("_")[0])
        want = golden[name].tolist()
        allocator = built(ChunkAllocator, chunk_length=length)
        got = allocator.choose(rows, inputs, None, len(want)).keep
        for head in got[0, 0]:
            assert head.nonzero().flatten().tolist() == want, name


def test_adakv(golden: Golden) -> None:
    found = cases(golden, "adakv")
    assert len(found) == ADAKV_CASES
    for name, score, _ in found:
        rows, inputs = layer_of(golden[score])
        want = torch.from_numpy(golden[name])
        heads, budget = len(want), int(want.sum()) // len(want)
        got = built(AdaKVAllocator).choose(rows, inputs, None, budget).keep[0, 0]
        assert torch.equal(got, want), name
        assert int(want.sum()) == heads * budget


@pytest.mark.parametrize("case", range(PYRAMID_CASES))
def test_pyramid_with_the_original_rounding(golden: Golden, case: int) -> None:
    row = dict(zip(golden["pyramid_cols"], golden["pyramid_params"][case], strict=True))
    num_layers, length = int(row["L"]), int(row["T"])
    budget = length * (1 - row["compression_ratio"])
    (exact,) = layer_budgets(
        num_layers, budget, torch.tensor([length]), row["beta"], int(row["window"])
    )
    want = golden["pyramid_budgets"][case]
    assert exact.round().tolist() == want[:num_layers].tolist()
    assert (want[num_layers:] == -1).all()
