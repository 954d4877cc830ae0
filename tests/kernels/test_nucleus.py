"""Nuclei and retained mass, against softmaxes written as loops in float64."""

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.kernels.nucleus import (
    nucleus_counts,
    nucleus_mask,
    nucleus_votes,
    retained_mass,
    row_nucleus_counts,
    window_mean,
)
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.window_usage import window_usage_ref

EVENTS, LAYERS, HEADS, GROUP, WINDOW, TOKENS, SIZE = 2, 3, 2, 4, 6, 50, 8
SCALE = 0.9
LENGTHS = [[[50, 37], [44, 50], [20, 50]], [[5, 50], [1, 2], [3, 4]]]


def window(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Queries, keys with NaN on padding, ragged lengths, scale."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(
        EVENTS, LAYERS, HEADS * GROUP, WINDOW, SIZE, generator=generator
    )
    keys = torch.randn(EVENTS, LAYERS, HEADS, TOKENS, SIZE, generator=generator)
    lengths = torch.tensor(LENGTHS)
    padding = torch.arange(TOKENS) >= lengths[..., None]
    return queries, keys.masked_fill(padding[..., None], math.nan), lengths, SCALE


def raw_rows(
    queries: torch.Tensor, keys: torch.Tensor, length: int, head: int
) -> list[list[float] | None]:
    """Raw attention of one (event, layer, head): probabilities per row of the window.

    None for rows outside the window of a short request.
    """
    rows: list[list[float] | None] = []
    for w in range(WINDOW):
        newest = length - WINDOW + w
        if w < WINDOW - min(max(length - 1, 1), WINDOW):
            rows.append(None)
            continue
        group = queries[head * GROUP : (head + 1) * GROUP, w].double()
        logits = (group @ keys[head, : newest + 1].double().T).amax(0) * SCALE
        rows.append(torch.softmax(logits, 0).tolist())
    return rows


def rows_of_heads(
    queries: torch.Tensor, keys: torch.Tensor
) -> Iterator[tuple[tuple[int, int, int], list[list[float] | None]]]:
    """Yield event, layer and head, and the `raw_rows` of these."""
    for at in product(range(EVENTS), range(LAYERS), range(HEADS)):
        *pair, head = at
        length = LENGTHS[at[0]][at[1]][head]
        yield at, raw_rows(queries[*pair], keys[*pair], length, head)


def nucleus_of(probs: list[float], mass: float) -> list[int]:
    """The fewest largest probabilities that reach the mass."""
    best = sorted(range(len(probs)), key=lambda i: -probs[i])
    total = 0.0
    for count, i in enumerate(best, 1):
        total += probs[i]
        if total >= mass:
            return best[:count]
    return best


@pytest.mark.parametrize("mass", [0.05, 0.6, 0.9, 0.999])
def test_counts_and_votes(mass: float) -> None:
    queries, keys, lengths, scale = window()
    counts = nucleus_counts(queries, keys, lengths, scale, mass)
    votes = nucleus_votes(queries, keys, lengths, scale, mass)
    assert counts.shape == (EVENTS, LAYERS, HEADS, WINDOW)
    usage = window_usage_ref(
        queries, PagedTokens.from_dense(keys), lengths, scale, mass
    )
    assert usage.nucleus is not None and torch.equal(usage.nucleus, counts)
    assert votes.shape == (EVENTS, LAYERS, HEADS, TOKENS)
    for at, rows in rows_of_heads(queries, keys):
        nuclei = [nucleus_of(row, mass) if row else [] for row in rows]
        assert counts[at].tolist() == [len(nucleus) for nucleus in nuclei]
        want = [sum(i in nucleus for nucleus in nuclei) for i in range(TOKENS)]
        assert votes[at].tolist() == want


def test_mass_one_is_every_visible_token() -> None:
    queries, keys, lengths, _ = window()
    counts = nucleus_counts(queries, keys, lengths, 40.0, 1.0)
    newest = lengths[..., None] - WINDOW + torch.arange(WINDOW)
    want = (newest + 1).clamp(min=0)
    assert torch.equal(counts[..., -1], lengths)
    in_window = counts > 0
    assert torch.equal(counts[in_window], want[in_window])


def test_results_do_not_depend_on_chunks_or_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, keys, lengths, scale = window()
    counts = nucleus_counts(queries, keys, lengths, scale, 0.9)
    monkeypatch.setattr(chunks, "CPU_CHUNK_BYTES", 1)
    assert torch.equal(nucleus_counts(queries, keys, lengths, scale, 0.9), counts)
    wider = torch.nn.functional.pad(keys, (0, 0, 0, 13), value=math.inf)
    assert torch.equal(nucleus_counts(queries, wider, lengths, scale, 0.9), counts)


def test_sums_are_exact() -> None:
    # Ten equal weights: 0.3 of the mass is three tokens, in floating point four.
    logits = torch.zeros(1, 10)
    for tenths in range(1, 11):
        marked = nucleus_mask(logits, tenths / 10)[0].nonzero().flatten().tolist()
        assert marked == list(range(10 - tenths, 10))


def test_hidden_rows_have_no_nucleus() -> None:
    logits = torch.tensor([[-math.inf] * 4, [0.0, -math.inf, 1.0, -math.inf]])
    assert nucleus_mask(logits, 1.0).tolist() == [
        [False] * 4,
        [True, False, True, False],
    ]


def test_retained_mass_and_lse_deficit() -> None:
    queries, keys, lengths, scale = window(1)
    generator = torch.Generator().manual_seed(2)
    keep = torch.rand(EVENTS, LAYERS, HEADS, TOKENS, generator=generator) < 0.5
    keep[..., 0] = True
    got = retained_mass(queries, keys, lengths, scale, keep)
    deficit = window_mean(-got.log(), lengths)
    for at, rows in rows_of_heads(queries, keys):
        kept = keep[at].tolist()
        want = [
            sum(p for p, k in zip(row, kept, strict=False) if k) if row else 1.0
            for row in rows
        ]
        torch.testing.assert_close(got[at], torch.tensor(want), rtol=1e-5, atol=1e-8)
        drops = [-math.log(m) for m, r in zip(want, rows, strict=True) if r]
        mean = torch.tensor(sum(drops) / len(drops))
        torch.testing.assert_close(deficit[at], mean, rtol=1e-5, atol=1e-6)


def test_nothing_lost_if_all_is_kept() -> None:
    queries, keys, lengths, scale = window()
    keep = torch.arange(TOKENS) < lengths[..., None]
    got = retained_mass(queries, keys, lengths, scale, keep)
    assert (got == 1).all()


class Elsewhere(torch.Tensor):
    """Stands for a tensor on another device, where NumPy does not sort."""


@pytest.mark.parametrize("mass", [0.05, 0.6, 0.9, 1.0])
def test_both_sorts_count_the_same(mass: float) -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(2))
    logits = (logits * 3).round().masked_fill(logits > 1.5, -math.inf)
    logits[0] = -math.inf
    want = nucleus_mask(logits, mass).sum(-1)
    assert torch.equal(row_nucleus_counts(logits, mass), want)
    elsewhere = row_nucleus_counts(logits.as_subclass(Elsewhere), mass)
    assert torch.equal(elsewhere.as_subclass(torch.Tensor), want)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_key_is_no_others_loss(broken: float) -> None:
    queries, keys, lengths, scale = window()
    queries = queries.abs()  # so that an infinite key has an infinite logit
    keys[0, 0, 0, 7] = broken
    counts = nucleus_counts(queries, keys, lengths, scale, 1.0)[0, 0, 0]
    seen = int(lengths[0, 0, 0]) - WINDOW + torch.arange(WINDOW) + 1
    # Every visible token, but for one whose logit is NaN or minus infinity.
    assert torch.equal(counts, seen - int(broken != math.inf))
    usage = window_usage_ref(queries, PagedTokens.from_dense(keys), lengths, scale)
    assert torch.isfinite(usage.mean).all()
    mean = usage.mean[0, 0, :GROUP]
    torch.testing.assert_close(mean.sum(-1), torch.ones(GROUP))
    assert (mean[:, 7] == (1.0 if broken == math.inf else 0.0)).all()
