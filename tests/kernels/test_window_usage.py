"""Window attention against a softmax written as loops, and the authors' usage."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_kvpolicy.kernels import window_usage
from vllm_kvpolicy.kernels.window_usage import (
    WindowUsage,
    mean_over_group,
    pooled_usage,
    window_usage_ref,
)

GOLDEN = Path(__file__).parents[1] / "golden"
EVENTS, LAYERS, HEADS, GROUP, SIZE, WINDOW, TOKENS = 3, 2, 2, 3, 16, 8, 40
SCALE = SIZE**-0.5


def make_inputs(
    dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (EVENTS, LAYERS, HEADS * GROUP, WINDOW, SIZE)
    queries = (2 * torch.randn(shape, generator=generator)).to(dtype)
    shape = (EVENTS, LAYERS, HEADS, TOKENS, SIZE)
    keys = (2 * torch.randn(shape, generator=generator)).to(dtype)
    return queries, keys, torch.tensor([40, 31, 20])


def naive_probs(queries: torch.Tensor, keys: torch.Tensor, length: int) -> torch.Tensor:
    """[Hq, W, length] float64 of one (event, layer)."""
    probs = torch.zeros(HEADS * GROUP, WINDOW, length, dtype=torch.float64)
    for head in range(HEADS * GROUP):
        for w in range(WINDOW):
            index = length - WINDOW + w
            if index < 0:
                continue
            seen = keys[head // GROUP, : index + 1].double()
            logits = seen @ queries[head, w].double() * SCALE
            probs[head, w, : index + 1] = torch.softmax(logits, 0)
    return probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_naive_softmax(dtype: torch.dtype) -> None:
    queries, keys, lengths = make_inputs(dtype)
    got = window_usage_ref(queries, keys, lengths, SCALE)
    assert got.mean.dtype == got.last.dtype == torch.float32
    for e in range(EVENTS):
        n = int(lengths[e])
        for layer in range(LAYERS):
            probs = naive_probs(queries[e, layer], keys[e, layer], n)
            tolerance = {"rtol": 1e-5, "atol": 1e-7}
            np.testing.assert_allclose(
                got.mean[e, layer, :, :n], probs.mean(1), **tolerance
            )
            np.testing.assert_allclose(
                got.last[e, layer, :, :n], probs[:, -1], **tolerance
            )
        assert (got.mean[e, ..., n:] == 0).all() and (got.last[e, ..., n:] == 0).all()


@pytest.mark.parametrize("length", [1, 2, 5, WINDOW, WINDOW + 1])
def test_short_requests_shorten_the_window(length: int) -> None:
    queries, keys, lengths = make_inputs(torch.float32)
    lengths[1] = length
    queries[1, :, :, : max(0, WINDOW - length)] = torch.nan
    got = window_usage_ref(queries, keys, lengths, SCALE)
    used = min(WINDOW, max(length - 1, 1))
    assert got.window.tolist() == [WINDOW, used, WINDOW]
    probs = naive_probs(queries[1, 0].nan_to_num(), keys[1, 0], length)
    want = probs[:, WINDOW - used :].mean(1)
    np.testing.assert_allclose(got.mean[1, 0, :, :length], want, rtol=1e-5, atol=1e-7)
    pooled = pooled_usage(got.mean, got.lengths, got.window)
    assert torch.isfinite(pooled).all()


def test_padding_may_hold_anything_and_changes_nothing() -> None:
    queries, keys, lengths = make_inputs(torch.float32)
    want = window_usage_ref(queries, keys, lengths, SCALE)
    keys[1, :, :, 31:] = torch.nan
    keys[2, :, :, 20:] = torch.inf
    got = window_usage_ref(queries, keys, lengths, SCALE)
    assert torch.equal(got.mean, want.mean) and torch.equal(got.last, want.last)
    for e in range(EVENTS):
        n = int(lengths[e])
        alone = window_usage_ref(
            queries[e : e + 1], keys[e : e + 1, ..., :n, :], lengths[e : e + 1], SCALE
        )
        # The same sums, though a matrix product may order its own by shape.
        np.testing.assert_allclose(
            alone.mean[0], want.mean[e, ..., :n], rtol=2e-6, atol=1e-9
        )


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, lengths = make_inputs(torch.float32)
    want = window_usage_ref(queries, keys, lengths, SCALE)
    one_pair = 4 * HEADS * GROUP * WINDOW * TOKENS
    monkeypatch.setattr(window_usage, "CHUNK_BYTES", 4 * one_pair)
    got = window_usage_ref(queries, keys, lengths, SCALE)
    np.testing.assert_allclose(got.mean, want.mean, rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(got.last, want.last, rtol=2e-6, atol=1e-9)


def test_refuses_shapes_that_do_not_fit() -> None:
    queries, keys, lengths = make_inputs(torch.float32)
    with pytest.raises(ValueError, match="queries: expected"):
        window_usage_ref(queries[:, :, :5], keys, lengths, SCALE)
    with pytest.raises(ValueError, match="queries: expected"):
        window_usage_ref(queries[:2], keys, lengths, SCALE)
    usage = WindowUsage(
        torch.rand(1, 1, 2, 9), torch.rand(1, 1, 2, 9), lengths, lengths
    )
    with pytest.raises(ValueError, match="pool_kernel: expected an odd number"):
        pooled_usage(usage.mean, lengths[:1], lengths[:1], pool_kernel=4)
    with pytest.raises(ValueError, match="suffix_pad: expected one of"):
        pooled_usage(usage.mean, lengths[:1], lengths[:1], suffix_pad="last")


@pytest.mark.parametrize("case", range(8))
def test_pooling_equals_the_authors(case: int) -> None:
    with np.load(GOLDEN / "ams_parity.npz") as data:
        row = data["usage_params"][case].astype(int).tolist()
        p = dict(zip(data["usage_cols"].tolist(), row, strict=True))
        attn = torch.from_numpy(data[f"u{case:02d}_attn"])
        want = data[f"u{case:02d}_u"]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        mean = mean_over_group(attn.to(dtype).mean(1)[None, None], p["Hk"])
        lengths, window = torch.tensor([p["T"]]), torch.tensor([p["W"]])
        got = pooled_usage(mean, lengths, window, p["pool_kernel"], "global")
        np.testing.assert_allclose(got[0, 0], want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("window", [32, 128])
def test_usage_from_keys_and_queries_equals_the_authors(
    layer: str, window: int
) -> None:
    with np.load(GOLDEN / "scorers_kvpress.npz") as data:
        keys = torch.from_numpy(data[f"{layer}_T257_k"])[None, None]
        queries = torch.from_numpy(data[f"{layer}_T257_q"])[None, None]
        want = data[f"{layer}_T257_ams_usage_w{window}"]
    usage = window_usage_ref(
        queries[..., -window:, :], keys, torch.tensor([257]), keys.shape[-1] ** -0.5
    )
    mean = mean_over_group(usage.mean, keys.shape[2])
    got = pooled_usage(mean, usage.lengths, usage.window, 5, "global")
    np.testing.assert_allclose(got[0, 0], want, rtol=2e-4, atol=1e-6)


def test_pads_are_per_request_and_head() -> None:
    mean = torch.rand(2, 2, 3, 30, generator=torch.Generator().manual_seed(0))
    lengths, window = torch.tensor([30, 22]), torch.tensor([8, 8])
    by_mode = {
        mode: pooled_usage(mean, lengths, window, 3, mode)
        for mode in ("max", "mean", "none")
    }
    for e, n in enumerate((30, 22)):
        older = torch.nn.functional.avg_pool1d(
            mean[e, ..., : n - 8], 3, stride=1, padding=1
        )
        for mode, got in by_mode.items():
            torch.testing.assert_close(got[e, ..., : n - 8], older)
            value = {"max": older.amax(-1), "mean": older.mean(-1)}.get(
                mode, torch.zeros(2, 3)
            )
            torch.testing.assert_close(
                got[e, ..., n - 8 : n], value[..., None].expand(-1, -1, 8)
            )
            assert (got[e, ..., n:] == 0).all()
