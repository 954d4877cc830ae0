"""Tests of lengths, cosines, projections and squares, which twins pass, on any pages.

Files of tests import all of them, say which twin runs, and of which operations there is
one: the fixture `name`. Slots that hold no key hold NaN. Tolerances: both sides add the
same float32 products in different orders, which moves a sum by a few units in the last
place of the sum of the products' sizes.
"""

from dataclasses import replace

import pytest
import torch

from support.scattered_pages import pools_apart, scattered
from vllm_kvpolicy.kernels import paged_reductions as operations
from vllm_kvpolicy.kernels.paged import PagedTokens

HALF, FULL = torch.float16, torch.float32
ROUNDING = 1e-6  # of the sum of the sizes of all terms
NAMES = ("paged_norms", "paged_cosines", "paged_projections", "paged_pair_projections")
NAMES += ("paged_quadratics",)
# Tiles of 64 tokens for heads of 128: one key, one tile and its neighbours, several.
RAGGED = torch.tensor([[[150, 1], [64, 65]], [[128, 17], [63, 2]]])
Case = tuple[PagedTokens, torch.Tensor, dict[str, tuple[torch.Tensor, ...]]]


def further(
    lengths: torch.Tensor, size: int, group: int
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return what operations take beside keys and lengths, as views."""
    generator = torch.Generator().manual_seed(2)
    num_events, num_layers, num_heads = lengths.shape
    shape = num_layers, num_events, num_heads * group
    along, by_length = (
        torch.randn(*shape, width, generator=generator).transpose(0, 1)
        for width in (size, size // 2)
    )
    rows = torch.randn(*shape, size, size, generator=generator).transpose(0, 1)
    given: dict[str, tuple[torch.Tensor, ...]] = dict.fromkeys(NAMES, ())
    given["paged_projections"] = (along[:, :, :num_heads],)
    given["paged_pair_projections"] = (along, by_length)
    given["paged_quadratics"] = (along, rows + rows.transpose(-1, -2))
    return given


def make_case(
    lengths: torch.Tensor = RAGGED,
    *,
    size: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = HALF,
    num_tokens: int | None = None,
    group: int = 3,
) -> Case:
    """Random keys of these lengths on pages, neighbours alike."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = num_tokens or int(lengths.max())
    tokens = torch.randn(*lengths.shape, num_tokens, size, generator=generator)
    keys = scattered((2 * tokens + 1).to(dtype), lengths, page_size)
    return keys, lengths, further(lengths, size, group)


def run(name: str, case: Case) -> torch.Tensor:
    """Run the twin through its operation, which copies no key."""
    operation, keys = getattr(operations, name), replace(case[0])
    before = operation.calls["reference"]
    result = operation(keys, case[1], *case[2][name])
    assert operation.calls["reference"] == before, "the twin has not run"
    assert "dense" not in vars(keys)
    return result


def check_twin(name: str, case: Case) -> torch.Tensor:
    """Compare with the reference; return what the twin found."""
    keys, lengths, given = case
    reference = getattr(operations, name).reference
    got, want = run(name, case), reference(keys, lengths, *given[name])
    assert got.dtype == FULL and got.shape == want.shape and got.is_contiguous()
    is_padding = torch.arange(keys.num_tokens) >= lengths[..., None]
    is_padding = is_padding.repeat_interleave(got.shape[2] // lengths.shape[2], 2)
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
@pytest.mark.parametrize("size", [1, 8, 32, 33, 64, 80, 96, 128, 256])
def test_equals_the_reference(name: str, size: int, dtype: torch.dtype) -> None:
    page_size = 32 if size % 32 else 16
    lengths = RAGGED[:1] if size > 64 else RAGGED
    if name == "paged_pair_projections":
        size += size % 2
    check_twin(name, make_case(lengths, size=size, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("group", [1, 8])
def test_groups_of_query_heads(name: str, group: int) -> None:
    check_twin(name, make_case(torch.tensor([[[150, 33]]]), group=group, size=32))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 48])
def test_short_rows(name: str, length: int) -> None:
    check_twin(name, make_case(torch.tensor([[[length]]]), size=32))


def test_layers_with_a_pool_each(name: str) -> None:
    keys, lengths, given = make_case(RAGGED[:1], size=32)
    want = run(name, (keys, lengths, given))
    got = check_twin(name, (pools_apart(keys), lengths, given))
    assert torch.equal(got, want)


def test_other_layouts_change_nothing(name: str) -> None:
    keys, lengths, given = make_case(RAGGED[:1], size=24, group=2)
    want = run(name, (keys, lengths, given))
    copies = {
        "plain": PagedTokens.from_dense(keys.dense[:]),
        "table with more columns": PagedTokens(
            keys.pools, torch.nn.functional.pad(keys.pages, (0, 3)), keys.num_tokens
        ),
        "table of another order": replace(
            keys, pages=keys.pages.transpose(0, 2).contiguous().transpose(0, 2)
        ),
    }
    assert not copies["table of another order"].pages.is_contiguous()
    strided = lengths.repeat_interleave(2, 2)[:, :, ::2]
    for copy in copies.values():
        assert torch.equal(run(name, (copy, strided, given)), want)


def test_a_row_alone_has_the_same_results(name: str) -> None:
    keys, lengths, given = make_case(size=64, num_tokens=200, group=2)  # two tiles
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
    got = check_twin(name, (keys, *case[1:]))
    apart = want.shape[2] // 4
    assert torch.equal(got[:, :, :apart], want[:, :, :apart])
    assert torch.equal(got[:, :, 3 * apart :], want[:, :, 3 * apart :])
    changed = (got != want).view(4, apart, 70).any(1)
    if name == "paged_cosines":
        assert got[0, 0, 1:3].isnan().all()
    else:
        assert changed.nonzero().tolist() == [[1, 5], [2, 7]]


def test_keys_of_zeros_have_no_direction(name: str) -> None:
    keys, lengths, given = make_case(torch.tensor([[[40, 3]]]), size=32, dtype=FULL)
    zeros = scattered(torch.zeros_like(keys.dense), lengths, 16)
    assert (check_twin(name, (zeros, lengths, given)) == 0).all()
