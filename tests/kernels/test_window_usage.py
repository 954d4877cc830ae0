"""Window attention against a softmax written as loops, and the authors' usage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.window_usage import (
    WindowUsage,
    mean_over_group,
    pooled_usage,
    window_usage_ref,
)

GOLDEN = Path(__file__).parents[1] / "golden"
EVENTS, LAYERS, HEADS, GROUP, SIZE, WINDOW, TOKENS = 3, 2, 2, 3, 16, 8, 40
SCALE = SIZE**-0.5
# Tokens held per (event, layer, head).
LENGTHS = (((40, 33), (27, 40)), ((31, 31), (31, 31)), ((20, 40), (17, 25)))


def make_inputs(
    dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (EVENTS, LAYERS, HEADS * GROUP, WINDOW, SIZE)
    queries = (2 * torch.randn(shape, generator=generator)).to(dtype)
    shape = (EVENTS, LAYERS, HEADS, TOKENS, SIZE)
    keys = (2 * torch.randn(shape, generator=generator)).to(dtype)
    return queries, keys, torch.tensor(LENGTHS)


def measure(
    queries: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    scale: float = SCALE,
    **options: Any,
) -> WindowUsage:
    """Run the reference on keys [E, L, H, T, D]."""
    paged = PagedTokens.from_dense(keys)
    return window_usage_ref(queries, paged, lengths, scale, **options)


def naive_probs(queries: torch.Tensor, keys: torch.Tensor, length: int) -> torch.Tensor:
    """Probabilities [G, W, length] float64 of one KV head with its query heads."""
    probs = torch.zeros(GROUP, WINDOW, length, dtype=torch.float64)
    for g in range(GROUP):
        for w in range(WINDOW):
            index = length - WINDOW + w
            if index < 0:
                continue
            logits = keys[: index + 1].double() @ queries[g, w].double() * SCALE
            probs[g, w, : index + 1] = torch.softmax(logits, 0)
    return probs


def rows(lengths: torch.Tensor) -> Iterator[tuple[int, int, int, slice, int]]:
    """Yield event, layer, KV head, its query heads and its length."""
    for e, layers in enumerate(lengths.tolist()):
        for layer, heads in enumerate(layers):
            for head, length in enumerate(heads):
                group = slice(head * GROUP, (head + 1) * GROUP)
                yield e, layer, head, group, length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_naive_softmax(dtype: torch.dtype) -> None:
    queries, keys, lengths = make_inputs(dtype)
    got = measure(queries, keys, lengths)
    assert got.mean.dtype == got.last.dtype == torch.float32
    for e, layer, head, group, n in rows(lengths):
        probs = naive_probs(queries[e, layer, group], keys[e, layer, head], n)
        mean, last = got.mean[e, layer, group], got.last[e, layer, group]
        tolerance = {"rtol": 1e-5, "atol": 1e-7}
        np.testing.assert_allclose(mean[:, :n], probs.mean(1), **tolerance)
        np.testing.assert_allclose(last[:, :n], probs[:, -1], **tolerance)
        assert (mean[:, n:] == 0).all() and (last[:, n:] == 0).all()


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    """By hand: weights 1, 3 and, of a third key, 2; the first sink has 4.

    The second head's sink is nothing beside its keys, whose weights are 1 and 3.
    """
    logits = torch.tensor([1.0, 3.0]).log()
    queries, keys = torch.ones(1, 1, 2, 2, 1), logits.view(1, 1, 1, 2, 1)
    lengths, sink_logits = torch.tensor([[[2]]]), torch.tensor([[4.0, 1e-30]]).log()
    got = measure(queries, keys, lengths, 1.0, sink_logits=sink_logits)
    want = torch.tensor([[[[1 / 8, 3 / 8], [1 / 4, 3 / 4]]]])
    torch.testing.assert_close(got.last, want)
    torch.testing.assert_close(got.mean, want)  # at two tokens only one query counts
    longer = torch.cat([keys, torch.tensor(2.0).log().view(1, 1, 1, 1, 1)], 3)
    got = measure(queries, longer, lengths + 1, 1.0, sink_logits=sink_logits)
    means = [[1 / 8 + 1 / 10, 3 / 8 + 3 / 10, 2 / 10]]
    means += [[1 / 4 + 1 / 6, 3 / 4 + 3 / 6, 2 / 6]]
    torch.testing.assert_close(got.mean, torch.tensor([[means]]) / 2)


def test_sinks_that_are_not_taken() -> None:
    queries, keys, lengths = make_inputs(torch.float32)
    given = queries, keys, lengths
    sink_logits = torch.zeros(LAYERS, HEADS * GROUP)
    for wrong in (sink_logits[:1], sink_logits[:, :1], sink_logits.double()):
        with pytest.raises(ValueError, match="^sink_logits: expected"):
            measure(*given, sink_logits=wrong)
    with pytest.raises(ValueError, match="^mass: expected None beside sinks"):
        measure(*given, mass=0.9, sink_logits=sink_logits)


@pytest.mark.parametrize("length", [1, 2, 5, WINDOW, WINDOW + 1])
def test_short_rows_shorten_the_window(length: int) -> None:
    queries, keys, lengths = make_inputs(torch.float32)
    lengths[1, :, 1] = length
    queries[1, :, GROUP:, : max(0, WINDOW - length)] = torch.nan
    got = measure(queries, keys, lengths)
    used = min(WINDOW, max(length - 1, 1))
    assert got.window[1].tolist() == [[WINDOW, used]] * LAYERS
    assert (got.window[::2] == WINDOW).all()
    probs = naive_probs(queries[1, 0, GROUP:].nan_to_num(), keys[1, 0, 1], length)
    want = probs[:, WINDOW - used :].mean(1)
    np.testing.assert_allclose(
        got.mean[1, 0, GROUP:, :length], want, rtol=1e-5, atol=1e-7
    )
    mean = mean_over_group(got.mean, HEADS)
    assert torch.isfinite(pooled_usage(mean, got.lengths, got.window)).all()


def test_padding_may_hold_anything_and_changes_nothing() -> None:
    queries, keys, lengths = make_inputs(torch.float32)
    want = measure(queries, keys, lengths)
    padding = torch.arange(TOKENS) >= lengths[..., None]
    for fill in (torch.nan, torch.inf):
        filled = keys.masked_fill(padding[..., None], fill)
        got = measure(queries, filled, lengths)
        assert torch.equal(got.mean, want.mean) and torch.equal(got.last, want.last)
    for e in range(EVENTS):
        n = int(lengths[e].max())
        one = slice(e, e + 1)
        alone = measure(queries[one], keys[one, ..., :n, :], lengths[one])
        # The same sums, though a matrix product may order its own by shape.
        np.testing.assert_allclose(
            alone.mean[0], want.mean[e, ..., :n], rtol=2e-6, atol=1e-9
        )


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, lengths = make_inputs(torch.float32)
    want = measure(queries, keys, lengths)
    for chunk_bytes in (1, 100_000):
        monkeypatch.setattr(chunks, "CPU_CHUNK_BYTES", chunk_bytes)
        got = measure(queries, keys, lengths)
        np.testing.assert_allclose(got.mean, want.mean, rtol=2e-6, atol=1e-9)
        np.testing.assert_allclose(got.last, want.last, rtol=2e-6, atol=1e-9)


def padded_alike(pooled: torch.Tensor, window: int) -> torch.Tensor:
    """Give the newest entries of all heads and requests one value, as the authors do.

    Args:
        pooled: padded with the largest of each head.
    """
    pooled[..., -window:] = pooled.amax()
    return pooled


@pytest.mark.parametrize("case", range(8))
def test_pooling_equals_the_authors(case: int) -> None:
    with np.load(GOLDEN / "ams_parity.npz") as data:
        row = data["usage_params"][case].astype(int).tolist()
        p = dict(zip(data["usage_cols"].tolist(), row, strict=True))
        attn = torch.from_numpy(data[f"u{case:02d}_attn"])
        want = data[f"u{case:02d}_u"]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        mean = mean_over_group(attn.to(dtype).mean(1)[None, None], p["Hk"])
        lengths = torch.full((1, 1, p["Hk"]), p["T"])
        window = torch.full((1, 1, p["Hk"]), p["W"])
        got = pooled_usage.reference(mean, lengths, window, p["pool_kernel"])
        got = padded_alike(got, p["W"])
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
    lengths, scale = torch.full(keys.shape[:3], 257), keys.shape[-1] ** -0.5
    usage = measure(queries[..., -window:, :], keys, lengths, scale)
    mean = mean_over_group(usage.mean, keys.shape[2])
    got = pooled_usage(mean, usage.lengths, usage.window, 5)
    got = padded_alike(got, int(usage.window[0, 0, 0]))
    np.testing.assert_allclose(got[0, 0], want, rtol=2e-4, atol=1e-6)


def test_pads_are_per_request_and_head() -> None:
    mean = torch.rand(2, 2, 2, 30, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([[[30, 22], [30, 30]], [[22, 22], [17, 9]]])
    window = torch.full_like(lengths, 8)
    by_mode = {
        mode: pooled_usage(mean, lengths, window, 3, mode)
        for mode in ("max", "mean", "none")
    }
    for e, layer, head, _, n in rows(lengths):
        row = mean[e, layer, head, None, : n - 8]
        older = torch.nn.functional.avg_pool1d(row, 3, stride=1, padding=1)[0]
        values = {"max": older.max(), "mean": older.mean(), "none": torch.zeros(())}
        for mode, got in by_mode.items():
            pooled = got[e, layer, head]
            torch.testing.assert_close(pooled[: n - 8], older)
            torch.testing.assert_close(pooled[n - 8 : n], values[mode].expand(8))
            assert (pooled[n:] == 0).all()
