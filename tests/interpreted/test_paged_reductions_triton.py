"""Lengths, cosines, projections and squares in Triton against their references.

Slots that hold no key hold NaN. Tolerances: both sides add the same float32 products
in different orders, which moves a sum by a few units in the last place of the sum of
the products' sizes.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from support.scattered_pages import Make, scattered
from vllm_kvpolicy.kernels import paged_reductions as operations
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.triton import paged_reductions as twin

HALF, FULL = torch.float16, torch.float32
FAR = 2**31  # elements that an int32 offset does not reach
ROUNDING = 1e-6  # of the sum of the sizes of all terms
NAMES = ("paged_norms", "paged_cosines", "paged_projections", "paged_pair_projections")
NAMES += ("paged_quadratics",)
PER_QUERY_HEAD = NAMES[3:]
GROUP = 3
# Tiles of 64 tokens for heads of 128: one key, one tile and its neighbours, several.
RAGGED = torch.tensor([[[150, 1], [64, 65]], [[128, 17], [63, 2]]])
Case = tuple[PagedTokens, torch.Tensor, dict[str, tuple[torch.Tensor, ...]]]


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill new tensors, so that what nothing wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def further(
    lengths: torch.Tensor, size: int, group: int = GROUP
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return what operations take beside keys and lengths, as views."""
    generator = torch.Generator().manual_seed(2)
    num_events, num_layers, num_heads = lengths.shape
    shape = num_layers, num_events, num_heads * group
    along, by_length = (
        torch.randn(*shape, width, generator=generator).transpose(0, 1)
        for width in (size, size // 2)
    )
    given: dict[str, tuple[torch.Tensor, ...]] = dict.fromkeys(NAMES, ())
    given["paged_projections"] = (along[:, :, :num_heads],)
    given["paged_pair_projections"] = (along, by_length)
    rows = torch.randn(*shape, size, size, generator=generator).transpose(0, 1)
    given["paged_quadratics"] = (along, rows + rows.transpose(-1, -2))
    return given


def make_case(
    lengths: torch.Tensor = RAGGED,
    *,
    size: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = HALF,
    num_tokens: int | None = None,
    group: int = GROUP,
) -> Case:
    """Random keys of these lengths on pages, neighbours alike."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = num_tokens or int(lengths.max())
    tokens = torch.randn(*lengths.shape, num_tokens, size, generator=generator)
    tokens = (2 * tokens + 1).to(dtype)
    keys = scattered(tokens, lengths, page_size)
    return keys, lengths, further(lengths, size, group)


def run(name: str, case: Case) -> torch.Tensor:
    """Run the twin through its operation."""
    operation = getattr(operations, name)
    before = operation.calls["triton"]
    result = operation(*case[:2], *case[2][name])
    assert operation.calls["triton"] == before + 1
    return result


def check(name: str, case: Case) -> torch.Tensor:
    """Compare with the reference; return what the twin found."""
    keys, lengths, given = case
    reference = getattr(operations, name).reference
    got, want = run(name, case), reference(keys, lengths, *given[name])
    assert got.dtype == FULL and got.shape == want.shape and got.is_contiguous()
    per_row = got.shape[2] // lengths.shape[2]
    is_padding = torch.arange(keys.num_tokens) >= lengths[..., None]
    is_padding = is_padding.repeat_interleave(per_row, 2)
    assert (got[is_padding] == 0).all()
    if name == "paged_cosines":
        sizes = torch.ones(())
    else:
        absolute = PagedTokens.from_dense(keys.dense.abs())
        sizes = reference(absolute, lengths, *(each.abs() for each in given[name]))
    off = (got - want).abs()
    is_same = (got == want) | (got.isnan() & want.isnan())
    assert (is_same | (off <= ROUNDING * sizes)).all()
    return got


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(name: str, size: int, dtype: torch.dtype) -> None:
    page_size = 32 if size % 32 else 16
    lengths = RAGGED[:1] if size > 64 else RAGGED
    check(name, make_case(lengths, size=size, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("size", [8, 33])
@pytest.mark.parametrize("name", sorted({*NAMES} - {"paged_pair_projections"}))
def test_odd_head_sizes(name: str, size: int) -> None:
    check(name, make_case(size=size))


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("name", PER_QUERY_HEAD)
def test_groups_of_query_heads(name: str, group: int) -> None:
    check(name, make_case(torch.tensor([[[150, 33]]]), group=group, size=32))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 48])
@pytest.mark.parametrize("name", NAMES)
def test_short_rows(name: str, length: int) -> None:
    check(name, make_case(torch.tensor([[[length]]]), size=32))


def test_means_of_more_tiles_than_are_added_at_once() -> None:
    per_tile, lengths = twin._tile(256), torch.tensor([[[1100, 513]]])
    assert twin.MEAN_TILES * per_tile < 513
    keys, _, given = make_case(lengths, size=256, dtype=FULL, num_tokens=1200)
    check("paged_cosines", (keys, lengths, given))
    tokens = torch.randn(1, 1, 2, 1200, 256)
    tokens[..., 0] += 20  # half of them point one way, the last ones another
    tokens[:, :, :, 512:, 0] -= 60
    keys = scattered(tokens, lengths, 16)
    got = check("paged_cosines", (keys, lengths, given))
    assert (got[0, 0, 0, 512:1100] > 0.5).all() and (got[0, 0, 0, :512] < -0.5).all()


def test_the_mean_is_summed_in_float64() -> None:
    """Where all else cancels, what is left is below the float32 rounding of the rest.

    1 + d + d - 1 is zero in float32, and so were the mean.
    """
    for far in (3, 100):  # in the first tile, and in the one after the next
        tokens = torch.zeros(1, 1, 1, far + 1, 256)
        tokens[..., 0, 0], tokens[..., far, 0] = 1, -1
        tokens[..., 1, :2] = torch.tensor([1e-9, 1.0])
        tokens[..., 2, :2] = torch.tensor([1e-9, -1.0])
        lengths = torch.tensor([[[far + 1]]])
        case = scattered(tokens, lengths, 16), lengths, {"paged_cosines": ()}
        got = check("paged_cosines", case)
        assert got[0, 0, 0, [0, far]].tolist() == [1, -1]


@pytest.mark.parametrize("name", NAMES)
def test_layers_with_a_pool_each(name: str) -> None:
    keys, lengths, given = make_case(RAGGED[:1], size=32)
    same = [keys.pools[0][:] for _ in keys.pools]  # views of their own, one place
    want = check(name, (replace(keys, pools=same), lengths, given))
    num_pages = keys.pages[:, 0].numel()
    apart = []
    for layer in range(2):
        size = num_pages + layer, 16, 64
        apart.append(torch.full(size, torch.nan, dtype=HALF)[..., :32])
        apart[layer][:num_pages] = keys.pools[0][keys.pages[:, layer].flatten()]
    pages = torch.arange(num_pages).view(1, 1, 2, -1).repeat(1, 2, 1, 1)
    got = check(name, (PagedTokens(apart, pages, keys.num_tokens), lengths, given))
    assert torch.equal(got, want)


def test_layers_that_share_a_pool_share_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids = []

    class Counted:
        def __getitem__(self, grid: tuple[int]):
            grids.append(grid)
            return kernel[grid]

    kernel = twin._norms_of_tiles
    monkeypatch.setattr(twin, "_norms_of_tiles", Counted())
    keys, lengths, given = make_case()
    check("paged_norms", (keys, lengths, given))
    assert grids == [(8 * 3,)]
    apart = replace(keys, pools=[keys.pools[0], keys.pools[1].clone()])
    check("paged_norms", (apart, lengths, given))
    assert grids[1:] == [(4 * 3,)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_other_layouts_change_nothing(name: str) -> None:
    keys, lengths, given = make_case(size=24)
    want = check(name, (keys, lengths, given))
    copies = {
        "columns": scattered(keys.dense, lengths, 32, columns=True),
        "plain": PagedTokens.from_dense(keys.dense),
        "table with more columns": PagedTokens(
            keys.pools, torch.nn.functional.pad(keys.pages, (0, 3)), keys.num_tokens
        ),
        "table of another order": replace(
            keys, pages=keys.pages.transpose(0, 2).contiguous().transpose(0, 2)
        ),
    }
    assert copies["columns"].pools[0].stride()[1:] == (1, 32)
    assert not copies["table of another order"].pages.is_contiguous()
    strided = lengths.repeat_interleave(2, 2)[:, :, ::2]
    for copy in copies.values():
        assert torch.equal(run(name, (copy, strided, given)), want)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_alone_has_the_same_results(name: str) -> None:
    keys, lengths, given = make_case(size=64, num_tokens=200)  # two tiles
    together = run(name, (keys, lengths, given))
    per_row = together.shape[2] // lengths.shape[2]
    for event, layer, head in ((0, 0, 0), (1, 1, 1)):
        at = slice(event, event + 1), slice(layer, layer + 1), slice(head, head + 1)
        own = slice(head * per_row, (head + 1) * per_row)
        length = int(lengths[at])
        pages = keys.pages[at][..., : -(-length // 16)]
        alone = PagedTokens(keys.pools[:1], pages, length)
        extra = {name: tuple(each[at[0], at[1], own] for each in given[name])}
        got = run(name, (alone, lengths[at], extra))
        assert torch.equal(got, together[at[0], at[1], own, :length])


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("name", NAMES)
def test_keys_that_are_no_numbers_stay_in_their_row(
    name: str, dtype: torch.dtype
) -> None:
    lengths = torch.tensor([[[70, 70, 70, 69]]])
    case = make_case(lengths, size=32, dtype=dtype)
    want = run(name, case)
    tokens = case[0].dense.clone()
    tokens[0, 0, 1, 5, 3] = torch.nan
    tokens[0, 0, 2, 7, 4] = torch.inf
    keys = scattered(tokens, lengths, 16)
    got = check(name, (keys, *case[1:]))
    apart = want.shape[2] // 4
    assert torch.equal(got[:, :, :apart], want[:, :, :apart])
    assert torch.equal(got[:, :, 3 * apart :], want[:, :, 3 * apart :])
    changed = (got != want).view(4, apart, 70).any(1)
    if name == "paged_cosines":
        assert got[0, 0, 1:3].isnan().all()
    else:
        assert changed.nonzero().tolist() == [[1, 5], [2, 7]]


@pytest.mark.slow
def test_directions_that_are_no_numbers_leave_padding_alone() -> None:
    keys, lengths, given = make_case(size=32)
    spoilt = {
        name: tuple(torch.full_like(each, torch.nan) for each in parts)
        for name, parts in given.items()
    }
    for name in NAMES[2:]:
        got = run(name, (keys, lengths, spoilt))
        is_padding = torch.arange(keys.num_tokens) >= lengths[..., None]
        is_padding = is_padding.repeat_interleave(got.shape[2] // 2, 2)
        assert (got[is_padding] == 0).all() and got[~is_padding].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_zeros_have_no_direction(name: str) -> None:
    keys, lengths, given = make_case(torch.tensor([[[40, 3]]]), size=32, dtype=FULL)
    zeros = scattered(torch.zeros_like(keys.dense), lengths, 16)
    assert (check(name, (zeros, lengths, given)) == 0).all()


def test_tiny_keys_are_cut_off_like_the_references() -> None:
    """Below 1e-12 the length counts as 1e-12, above it does not."""
    tokens = torch.zeros(1, 1, 1, 3, 32)
    tokens[0, 0, 0, :, 1] = torch.tensor([1.0, 5e-13, 2e-12])
    lengths = torch.tensor([[[3]]])
    case = scattered(tokens, lengths, 16), lengths, {"paged_cosines": ()}
    assert check("paged_cosines", case).flatten().tolist() == [1, 0.5, 1]


@pytest.mark.parametrize("name", NAMES)
def test_pages_beyond_int32_are_read(name: str, unbacked: Make) -> None:
    keys, lengths, given = make_case(torch.tensor([[[40, 33]]]), size=32)
    want = check(name, (keys, lengths, given))
    page = 16 * 64
    # In the middle, so that an offset that wraps around reads zeros.
    memory = unbacked(2 * FAR + 100 * page, HALF)
    pool = memory[FAR:].as_strided((FAR // page + 50, 16, 32), (page, 64, 1))
    pages = keys.pages + FAR // page
    pool[pages] = keys.pools[0][keys.pages]
    far = PagedTokens([pool], pages, keys.num_tokens)
    assert torch.equal(run(name, (far, lengths, given)), want)


def test_rows_beyond_int32_are_read_and_written(unbacked: Make) -> None:
    """A row whose pages, directions, sums and results lie 2^31 elements away."""
    lengths, num_tokens, num_pages = torch.tensor([[[40]]]), 40, 33
    keys, _, given = make_case(lengths, size=32, group=1)
    row, pool = FAR // 32 + 7, keys.pools[0]
    directions, by_length = given["paged_pair_projections"]

    def far(last: torch.Tensor) -> torch.Tensor:
        """Return rows of which only the last is in use."""
        rows = unbacked((row + 1) * last.numel(), last.dtype)
        rows[-last.numel() :] = last.flatten()
        return rows

    table = torch.nn.functional.pad(keys.pages.flatten(), (0, num_pages - 3))
    inputs = pool, *pool.stride(), far(table), far(lengths)
    inputs = *inputs, 1, 1, row, num_tokens, num_pages, 16
    sizes = {"SIZE": 32, "WIDTH": 32, "TILE": 128}
    got = {name: far(torch.zeros(num_tokens)) for name in NAMES}
    twin._norms_of_tiles[(1,)](*inputs, got["paged_norms"], **sizes)
    twin._projections_of_tiles[(1,)](
        *(*inputs, far(directions), got["paged_projections"]), **sizes, IS_COSINE=False
    )
    twin._pair_projections_of_tiles[(1,)](
        *(*inputs, far(directions), far(by_length), got["paged_pair_projections"]),
        **sizes,
        GROUP=1,
    )
    matrices = given["paged_quadratics"][1]
    twin._quadratics_of_tiles[(1,)](
        *(*inputs, far(directions), far(matrices), got["paged_quadratics"]),
        **sizes,
        GROUP=1,
        ROWS=twin.MATRIX_ROWS,
    )
    sums, mean = far(torch.zeros(32, dtype=torch.float64)), far(torch.zeros(32))
    twin._sums_of_tiles[(1,)](*inputs, sums, **sizes)
    twin._means_of_rows[(1,)](lengths, sums[-32:], mean[-32:], 1, **sizes, TILES=16)
    twin._projections_of_tiles[(1,)](
        *(*inputs, mean, got["paged_cosines"]), **sizes, IS_COSINE=True
    )
    case = keys, lengths, {**given, "paged_projections": (directions,)}
    for name in NAMES:
        assert torch.equal(got[name][-num_tokens:], check(name, case).flatten())


def test_refuses_shapes_that_do_not_fit() -> None:
    keys, lengths, given = make_case(torch.tensor([[[9, 9]]]), size=32)
    along, by_length = given["paged_pair_projections"]
    with pytest.raises(ValueError, match="directions: expected"):
        operations.paged_projections(keys, lengths, along)
    with pytest.raises(ValueError, match="directions: expected"):
        operations.paged_pair_projections(keys, lengths, along[:, :, 1:], by_length)
    with pytest.raises(ValueError, match="by_length: expected"):
        operations.paged_pair_projections(keys, lengths, along, along)
    with pytest.raises(ValueError, match="matrices: expected"):
        operations.paged_quadratics(keys, lengths, along, by_length)
