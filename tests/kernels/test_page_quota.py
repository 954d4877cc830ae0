"""Pages per head: against dealing them out one by one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sweeps import trials
from vllm_kvpolicy.kernels.assign_pages import page_quota

CASES = settings(max_examples=trials(120), deadline=None, derandomize=True)
Rows = list[list[int]]


@st.composite
def groups(draw: st.DrawFn) -> tuple[Rows, Rows, Rows, int]:
    """Tokens, floors and caps of 3 groups, and a block size."""
    heads = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 90), min_size=heads, max_size=heads)
    tokens = [draw(row) for _ in range(3)]
    low = st.lists(st.integers(0, 4), min_size=heads, max_size=heads)
    floors = [draw(low) for _ in range(3)]
    caps = [[f + draw(st.integers(0, 6)) for f in part] for part in floors]
    return tokens, floors, caps, draw(st.sampled_from([1, 2, 7, 16]))


def quota(
    tokens: Rows, floors: Rows, caps: Rows, total: list[int], block_size: int
) -> Rows:
    parts = map(torch.tensor, (tokens, floors, caps, total))
    return page_quota(*parts, block_size).tolist()


def deal(
    tokens: list[int], floors: list[int], caps: list[int], total: int, block_size: int
) -> list[int]:
    """Floors first, then each page to the head with most tokens outside its pages."""
    given = list(floors)
    while sum(given) < min(total, sum(caps)):
        outside = [
            t - g * block_size if g < c else float("-inf")
            for t, g, c in zip(tokens, given, caps, strict=True)
        ]
        given[outside.index(max(outside))] += 1
    return given


@CASES
@given(groups(), st.lists(st.integers(0, 130), min_size=3, max_size=3))
def test_equals_dealing(case: tuple[Rows, Rows, Rows, int], total: list[int]) -> None:
    tokens, floors, caps, block_size = case
    got = quota(tokens, floors, caps, total, block_size)
    for g in range(3):
        want = deal(tokens[g], floors[g], caps[g], total[g], block_size)
        assert got[g] == want


def test_counts_of_a_real_model() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2**20, (4, 288), generator=generator)
    total = (tokens.sum(-1) // 16) + torch.tensor([0, 1000, -100000, 144])
    caps = torch.full_like(tokens, 2**16)
    got = page_quota(tokens, torch.full_like(tokens, 3), caps, total, 16)
    assert torch.equal(got.sum(-1), total)
    assert (got >= 3).all() and (got <= 2**16).all()
