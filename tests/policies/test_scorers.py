"""Scorers against kvpress's numbers, and against softmaxes written as loops."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_kvpolicy.kernels.window_usage import window_usage_ref
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.snapkv import SnapKVScorer
from vllm_kvpolicy.policies.streaming import StreamingScorer
from vllm_kvpolicy.policies.tova import TovaScorer, cross_head_mean

GOLDEN = Path(__file__).parents[1] / "golden" / "scorers_kvpress.npz"


def event(
    keys: torch.Tensor, queries: torch.Tensor, lengths: torch.Tensor
) -> EventInputs:
    """An event over keys [E, L, H, T, D] and queries [E, L, Hq, W, D]."""
    num_events, num_layers, num_heads, num_tokens, size = keys.shape
    return EventInputs(
        lengths=lengths,
        must_keep=torch.zeros(num_events, num_tokens, dtype=torch.bool),
        keys=keys,
        queries=queries,
        credit=None,
        scale=size**-0.5,
        num_layers=num_layers,
        num_kv_heads=num_heads,
    )


def score(scorer: TovaScorer | SnapKVScorer, inputs: EventInputs) -> torch.Tensor:
    queries = inputs.queries[..., -scorer.window_tokens :, :]
    usage = window_usage_ref(queries, inputs.keys, inputs.lengths, inputs.scale)
    return scorer.score(inputs, usage)


@pytest.mark.parametrize("layer", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tokens", [96, 257])
@pytest.mark.parametrize("name", ["tova", "snapkv_w32", "snapkv_w64"])
def test_equals_kvpress(layer: str, tokens: int, name: str) -> None:
    with np.load(GOLDEN) as data:
        prefix = f"{layer}_T{tokens}_"
        keys = torch.from_numpy(data[prefix + "k"])[None, None]
        queries = torch.from_numpy(data[prefix + "q"])[None, None]
        want = data[f"{prefix}score_{name}"]
    window = 1 if name == "tova" else int(name[-2:])
    scorer = TovaScorer() if name == "tova" else SnapKVScorer(window)
    got = score(scorer, event(keys, queries, torch.tensor([tokens])))[0, 0]
    older = slice(0, tokens - window)
    np.testing.assert_allclose(got[:, older], want[:, older], rtol=2e-4, atol=1e-6)
    # kvpress protects the newest with the maximum over all heads plus 1, we per head.
    highest = got[:, older].amax(-1, keepdim=True)
    if name != "tova":
        assert (got[:, tokens - window :] == highest).all()
    assert (got[:, -1:] >= highest).all()


def test_tova_is_one_row_for_all_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 2, 50, 8, generator=generator)
    queries = torch.randn(2, 3, 8, 4, 8, generator=generator)
    lengths = torch.tensor([50, 37])
    got = score(TovaScorer(), event(keys, queries, lengths))
    for e, n in enumerate((50, 37)):
        for layer in range(3):
            row = torch.zeros(n, dtype=torch.float64)
            for head in range(8):
                logits = keys[e, layer, head // 4, :n] @ queries[e, layer, head, -1]
                row += torch.softmax(logits.double() * 8**-0.5, 0) / 8
            row[-1] = row.max()
            for head in range(2):
                np.testing.assert_allclose(
                    got[e, layer, head, :n], row, rtol=1e-5, atol=1e-7
                )


def test_snapkv_equals_loops() -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 1, 2, 40, 8, generator=generator)
    queries = torch.randn(2, 1, 4, 6, 8, generator=generator)
    lengths = torch.tensor([40, 23])
    got = score(SnapKVScorer(6, 3), event(keys, queries, lengths))
    for e, n in enumerate((40, 23)):
        for head in range(2):
            mean = [0.0] * n
            for q in (2 * head, 2 * head + 1):
                for w in range(6):
                    seen = n - 6 + w + 1
                    logits = keys[e, 0, head, :seen] @ queries[e, 0, q, w]
                    probs = torch.softmax(logits.double() * 8**-0.5, 0).tolist()
                    mean = [
                        m + p / 12
                        for m, p in zip(mean, probs + [0.0] * (n - seen), strict=True)
                    ]
            older = mean[: n - 6]
            pooled = [sum(older[max(0, i - 1) : i + 2]) / 3 for i in range(len(older))]
            row = pooled + [max(pooled)] * 6
            np.testing.assert_allclose(got[e, 0, head, :n], row, rtol=1e-5, atol=1e-7)


def test_streaming_prefers_the_newest() -> None:
    keys = torch.zeros(2, 3, 4, 30, 8)
    got = StreamingScorer().score(event(keys, None, torch.tensor([30, 20])), None)
    assert got.shape == (2, 3, 4, 30)
    assert (got[..., 1:] > got[..., :-1]).all()


def test_cross_head_mean_keeps_the_axis() -> None:
    rows = torch.rand(2, 3, 8, 5)
    got = cross_head_mean(rows)
    assert got.shape == (2, 3, 1, 5)
    torch.testing.assert_close(got[:, :, 0], rows.sum(2) / 8)


@pytest.mark.parametrize("scorer", [TovaScorer(), SnapKVScorer()])
def test_missing_usage_is_an_error(scorer: TovaScorer | SnapKVScorer) -> None:
    inputs = event(torch.zeros(1, 1, 1, 4, 2), None, torch.tensor([4]))
    with pytest.raises(ValueError, match="usage: expected"):
        scorer.score(inputs, None)
