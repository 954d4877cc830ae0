"""Pages per head: against dealing them out one by one, and what must always hold."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sweeps import trials
from vllm_kvpolicy.kernels.assign_pages import page_quota

CASES = settings(max_examples=trials(100), deadline=None, derandomize=True)
Rows = list[list[int]]


@st.composite
def groups(draw: st.DrawFn, bounded: bool = True) -> tuple[Rows, Rows, Rows, int]:
    """Tokens, floors and caps of 3 groups, and a block size."""
    heads = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 90), min_size=heads, max_size=heads)
    tokens = [draw(row) for _ in range(3)]
    if not bounded:
        return tokens, [[0] * heads] * 3, [[10**6] * heads] * 3, draw(BLOCK_SIZES)
    low = st.lists(st.integers(0, 4), min_size=heads, max_size=heads)
    floors = [draw(low) for _ in range(3)]
    caps = [[f + draw(st.integers(0, 6)) for f in part] for part in floors]
    return tokens, floors, caps, draw(BLOCK_SIZES)


BLOCK_SIZES = st.sampled_from([1, 2, 7, 16])


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


@CASES
@given(groups(), st.lists(st.floats(-0.3, 1.3), min_size=3, max_size=3))
def test_total_floors_and_caps(
    case: tuple[Rows, Rows, Rows, int], share: list[float]
) -> None:
    tokens, floors, caps, block_size = case
    low, high = [sum(f) for f in floors], [sum(c) for c in caps]
    total = [round(a + s * (b - a)) for a, b, s in zip(low, high, share, strict=True)]
    got = quota(tokens, floors, caps, total, block_size)
    for g in range(3):
        assert sum(got[g]) == min(max(total[g], low[g]), high[g])
        for pages, floor, cap in zip(got[g], floors[g], caps[g], strict=True):
            assert floor <= pages <= cap


@CASES
@given(groups(), st.integers(0, 100))
def test_a_larger_total_takes_no_page_away(
    case: tuple[Rows, Rows, Rows, int], total: int
) -> None:
    tokens, floors, caps, block_size = case
    less = quota(tokens, floors, caps, [total] * 3, block_size)
    more = quota(tokens, floors, caps, [total + 1] * 3, block_size)
    for a, b in zip(less, more, strict=True):
        assert all(0 <= y - x <= 1 for x, y in zip(a, b, strict=True))
        assert sum(b) - sum(a) in (0, 1)


@CASES
@given(groups(bounded=False), st.data())
def test_within_one_page_of_the_exact_share(
    case: tuple[Rows, Rows, Rows, int], data: st.DataObject
) -> None:
    tokens, floors, caps, block_size = case
    heads = len(tokens[0])
    # Shares below zero would meet a bound.
    spread = [sum(row) - heads * min(row) for row in tokens]
    total = [-(-s // block_size) + data.draw(st.integers(0, 50)) for s in spread]
    got = quota(tokens, floors, caps, total, block_size)
    for row, pages, whole in zip(tokens, got, total, strict=True):
        shift = (whole * block_size - sum(row)) / heads
        for asked, page in zip(row, pages, strict=True):
            assert abs(page - (asked + shift) / block_size) < 1


@CASES
@given(groups(), st.integers(0, 60), st.randoms(use_true_random=False))
def test_heads_may_change_places(
    case: tuple[Rows, Rows, Rows, int], total: int, random: object
) -> None:
    tokens, floors, caps, block_size = case
    heads = len(tokens[0])
    # Distinct claims to every page: only ties depend on the order of the heads.
    tokens = [[block_size * heads * t + h for h, t in enumerate(row)] for row in tokens]
    block_size *= heads
    places = list(range(heads))
    random.shuffle(places)
    plain = quota(tokens, floors, caps, [total] * 3, block_size)
    moved = [
        [[row[i] for i in places] for row in part] for part in (tokens, floors, caps)
    ]
    got = quota(*moved, [total] * 3, block_size)
    assert got == [[row[i] for i in places] for row in plain]


@CASES
@given(groups(), st.integers(0, 60))
def test_a_group_does_not_depend_on_others(
    case: tuple[Rows, Rows, Rows, int], total: int
) -> None:
    tokens, floors, caps, block_size = case
    batch = quota(tokens, floors, caps, [total] * 3, block_size)
    for g in range(3):
        alone = quota([tokens[g]], [floors[g]], [caps[g]], [total], block_size)
        assert alone == [batch[g]]


def test_ties_go_to_the_lower_index() -> None:
    assert quota([[8, 8, 8]], [[0] * 3], [[9] * 3], [5], 16) == [[2, 2, 1]]
    assert quota([[8, 8, 8]], [[0] * 3], [[9] * 3], [2], 16) == [[1, 1, 0]]


def test_largest_remainder() -> None:
    got = quota([[35, 25, 9, 11]], [[0] * 4], [[9] * 4], [5], 16)
    assert got == [[2, 2, 0, 1]]


def test_counts_of_a_real_model() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2**20, (4, 288), generator=generator)
    total = (tokens.sum(-1) // 16) + torch.tensor([0, 1000, -100000, 144])
    caps = torch.full_like(tokens, 2**16)
    got = page_quota(tokens, torch.full_like(tokens, 3), caps, total, 16)
    assert torch.equal(got.sum(-1), total)
    assert (got >= 3).all() and (got <= 2**16).all()
