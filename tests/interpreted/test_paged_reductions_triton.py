"""Lengths, cosines, projections and squares in Triton: tiles, and far offsets."""

from dataclasses import replace

import pytest
import torch

from support.scattered_pages import FAR, Make, far_away, scattered
from support.twins_of_reductions import *  # noqa: F403
from support.twins_of_reductions import FULL, NAMES, check_twin, make_case, run
from vllm_kvpolicy.kernels.triton import paged_reductions as twin


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_columns_change_nothing(name: str) -> None:
    keys, lengths, given = make_case(torch.tensor([[[70, 33]]]), size=24, group=2)
    columns = scattered(keys.dense, lengths, 32, columns=True)
    assert columns.pools[0].stride()[1:] == (1, 32)
    case = keys, lengths, given
    assert torch.equal(run(name, (columns, lengths, given)), run(name, case))


def test_means_of_more_tiles_than_are_added_at_once() -> None:
    per_tile, lengths = twin._tile(256), torch.tensor([[[1100, 513]]])
    assert twin.MEAN_TILES * per_tile < 513
    keys, _, given = make_case(lengths, size=256, dtype=FULL, num_tokens=1200)
    tokens = torch.randn(1, 1, 2, 1200, 256)
    tokens[..., 0] += 20  # half of them point one way, the last ones another
    tokens[:, :, :, 512:, 0] -= 60
    keys = scattered(tokens, lengths, 16)
    got = check_twin("paged_cosines", (keys, lengths, given))
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
        got = check_twin("paged_cosines", case)
        assert got[0, 0, 0, [0, far]].tolist() == [1, -1]


def test_layers_that_share_a_pool_share_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids = []

    class Counted:
        def __getitem__(self, grid: tuple[int]):
            grids.append(grid)
            return kernel[grid]

    kernel = twin._values_of_tiles
    monkeypatch.setattr(twin, "_values_of_tiles", Counted())
    keys, lengths, given = make_case()
    check_twin("paged_norms", (keys, lengths, given))
    assert grids == [(8 * 3,)]
    apart = replace(keys, pools=[keys.pools[0], keys.pools[1].clone()])
    check_twin("paged_norms", (apart, lengths, given))
    assert grids[1:] == [(4 * 3,)] * 2


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


def test_tiny_keys_are_cut_off_like_the_references() -> None:
    """Below 1e-12 the length counts as 1e-12, above it does not."""
    tokens = torch.zeros(1, 1, 1, 3, 32)
    tokens[0, 0, 0, :, 1] = torch.tensor([1.0, 5e-13, 2e-12])
    lengths = torch.tensor([[[3]]])
    case = scattered(tokens, lengths, 16), lengths, {"paged_cosines": ()}
    assert check_twin("paged_cosines", case).flatten().tolist() == [1, 0.5, 1]


def test_pages_beyond_int32_are_read(name: str, unbacked: Make) -> None:
    keys, lengths, given = make_case(torch.tensor([[[40, 33]]]), size=32)
    want = check_twin(name, (keys, lengths, given))
    far = far_away(keys, unbacked)
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
    options = {"GROUP": 1, "ROWS": twin.MATRIX_ROWS, "IS_COSINE": False}
    sums, mean = far(torch.zeros(32, dtype=torch.float64)), far(torch.zeros(32))
    twin._sums_of_tiles[(1,)](*inputs, sums, **sizes)
    twin._means_of_rows[(1,)](lengths, sums[-32:], mean[-32:], 1, **sizes, TILES=16)
    along, matrices = map(far, given["paged_quadratics"])
    got = {name: far(torch.zeros(num_tokens)) for name in NAMES}
    for name, rows in {
        "paged_norms": (None, None),
        "paged_cosines": (mean, None),
        "paged_projections": (along, None),
        "paged_quadratics": (along, matrices),
    }.items():
        options["IS_COSINE"] = name == "paged_cosines"
        twin._values_of_tiles[(1,)](*inputs, *rows, got[name], **sizes, **options)
    pairs = along, far(by_length), got["paged_pair_projections"]
    twin._pair_projections_of_tiles[(1,)](*inputs, *pairs, **sizes, GROUP=1)
    case = keys, lengths, {**given, "paged_projections": (directions,)}
    for name in NAMES:
        assert torch.equal(got[name][-num_tokens:], check_twin(name, case).flatten())
