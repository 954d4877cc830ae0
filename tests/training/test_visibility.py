"""The closed form of who sees whom, against replayed caches and the authors' masks."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from training.visibility import settled, visible, visible_until
from vllm_kvpolicy.kernels.visibility import NEVER


def replay(keep: list[bool], window: int, page: int) -> list[set[int]]:
    """Return the positions that each query sees, for one KV head.

    The cache holds a dense part, whose pages leave it when none of their tokens is in
    the window any more, and a part of tokens that were kept when they left. With pages
    of one token this is what the authors' ring does.

    Args:
        keep: by position.
        window: tokens in the window, the querying one included.
        page: tokens of a page.
    """
    dense: list[int] = []
    kept: list[int] = []
    seen = []
    for query in range(len(keep)):
        dense.append(query)
        while True:
            oldest = dense[:page]
            if len(oldest) < page or oldest[-1] > query - window:
                break
            dense = dense[page:]
            kept += [token for token in oldest if keep[token]]
        seen.append({*dense, *kept})
    return seen


GOLDEN = Path(__file__).parents[1] / "golden" / "wgkv_gate.npz"
MASKS, TRACES = range(5), range(4)
CASES = [  # tokens, window, page, share kept
    (40, 8, 1, 0.5),
    (40, 8, 4, 0.5),
    (61, 16, 16, 0.2),
    (61, 5, 8, 0.7),
    (33, 1, 1, 0.3),
    (33, 1, 4, 0.0),
    (20, 32, 4, 0.1),
    (70, 24, 16, 0.9),
    (30, 7, 1, 0.0),
    (30, 7, 4, 1.0),
]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as data:
        return dict(data)


def params(golden: dict[str, np.ndarray], kind: str, case: int) -> dict[str, int]:
    names, values = golden[f"{kind}_cols"], golden[f"{kind}_params"][case]
    return dict(zip(map(str, names), map(int, values), strict=True))


def bits(num_tokens: int, share: float, heads: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.rand(heads, num_tokens, generator=generator) < share


def mask(keep: torch.Tensor, window: int, **how: int) -> torch.Tensor:
    """What all queries of a sequence see, [..., T, T]."""
    until = visible_until(keep, window, **how)
    assert until.dtype == torch.int32
    return visible(until, torch.arange(keep.shape[-1]))


@pytest.mark.parametrize("case", MASKS)
def test_prefill_masks_of_the_authors(golden: dict[str, np.ndarray], case: int) -> None:
    p = params(golden, "mask", case)
    packed = golden[f"mask{case}_prefill64_packed"]
    want = np.unpackbits(packed, axis=-1)[..., : p["T"]].astype(bool)
    keep = torch.from_numpy(golden[f"mask{case}_bits"])
    np.testing.assert_array_equal(mask(keep, p["W"], dilation=64), want)
    exact = mask(keep, p["W"]).numpy()
    assert (want | ~exact).all()  # the authors' queries see more, never less
    assert (want & ~exact).any() == (p["T"] > p["W"])


@pytest.mark.parametrize("case", TRACES)
def test_cache_traces_of_the_authors(golden: dict[str, np.ndarray], case: int) -> None:
    p = params(golden, "ring", case)
    keep = torch.from_numpy(golden[f"ring{case}_bits"])
    num_tokens = keep.shape[-1]
    packed = golden[f"ring{case}_visible_packed"]
    want = np.unpackbits(packed, axis=-1)[..., :num_tokens].astype(bool)
    until = visible_until(keep, p["W"])
    got = visible(until, p["prompt"] + torch.arange(p["steps"]))
    np.testing.assert_array_equal(got.permute(2, 0, 1, 3), want)
    left = keep[..., : num_tokens - p["W"]].sum(-1)
    np.testing.assert_array_equal(left, golden[f"ring{case}_final_global_len"])


@pytest.mark.parametrize(("num_tokens", "window", "page", "share"), CASES)
def test_a_replayed_cache(
    num_tokens: int, window: int, page: int, share: float
) -> None:
    keep = bits(num_tokens, share)
    assert torch.equal(visible_until(keep, window, page=page) == NEVER, keep)
    got = mask(keep, window, page=page)
    for head, row in enumerate(keep.tolist()):
        for query, want in enumerate(replay(row, window, page)):
            assert set(got[head, query].nonzero().flatten().tolist()) == want


@pytest.mark.parametrize(("num_tokens", "window", "page", "share"), CASES)
@pytest.mark.parametrize("dilation", [1, 8])
def test_chunks_of_a_sequence(
    num_tokens: int, window: int, page: int, share: float, dilation: int
) -> None:
    keep = bits(num_tokens, share)
    how = {"page": page, "dilation": dilation, "sinks": 3}
    whole = visible_until(keep, window, **how)
    drawn = random.Random(num_tokens)
    first = 0
    while first < num_tokens:
        stop = drawn.randint(first + 1, num_tokens)
        part = visible_until(keep[:, first:stop], window, first=first, **how)
        assert torch.equal(part, whole[:, first:stop])
        queries = torch.arange(first, num_tokens)
        seen = visible(part, queries, first=first)
        want = visible(whole, queries)[..., first:stop]
        assert torch.equal(seen, want)
        first = stop


@pytest.mark.parametrize(("num_tokens", "window", "page", "share"), CASES)
def test_sinks_stay(num_tokens: int, window: int, page: int, share: float) -> None:
    keep = bits(num_tokens, share)
    with_sinks = keep.clone()
    with_sinks[:, :5] = True
    got = mask(keep, window, page=page, sinks=5)
    assert torch.equal(got, mask(with_sinks, window, page=page))
    assert got[:, 4:, :5].all()
    if share < 0.5 and num_tokens > window + page + 5:
        assert not torch.equal(got, mask(keep, window, page=page))


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_decision_governs_an_earlier_token(shift: int) -> None:
    """As in DMS: seen while i - j <= 8, or where the token at j + shift says so."""
    num_tokens, window = 50, 9
    decisions = bits(num_tokens, 0.5)
    got = mask(settled(decisions, shift), window)
    for head, query, key in np.ndindex(3, num_tokens, num_tokens):
        says = decisions[head, key + shift] if key + shift < num_tokens else True
        want = key <= query and (query - key <= window - 1 or bool(says))
        assert bool(got[head, query, key]) == want


def test_undecided_tokens_settle_with_the_next_chunk() -> None:
    decisions = bits(50, 0.5)
    whole = visible_until(settled(decisions, 1), 9)
    for stop in (10, 37):
        early = visible_until(settled(decisions[:, :stop], 1), 9)
        assert torch.equal(early[:, : stop - 1], whole[:, : stop - 1])
        assert (early[:, stop - 1] == NEVER).all()
        # Within the chunk nothing depends on what is not decided yet.
        queries = torch.arange(stop)
        assert torch.equal(visible(early, queries), visible(whole, queries)[..., :stop])
