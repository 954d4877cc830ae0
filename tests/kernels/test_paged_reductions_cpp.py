"""Lengths and squares of keys in C++ against their references, on every layout.

Slots that hold no key hold NaN, and so does fresh memory. Tolerances: both sides add
the same float32 products in different orders, which moves a sum by a few units in the
last place of the sum of the products' sizes.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from support.scattered_pages import scattered
from vllm_kvpolicy.kernels import paged_reductions as operations
from vllm_kvpolicy.kernels.dispatch import forced
from vllm_kvpolicy.kernels.paged import PagedTokens

NAMES = "paged_norms", "paged_quadratics"
DTYPES = torch.float32, torch.float16, torch.bfloat16
ROUNDING = 1e-6  # of the sum of the sizes of all terms
RAGGED = torch.tensor([[[150, 1], [64, 65]], [[128, 17], [63, 2]]])
Case = tuple[PagedTokens, torch.Tensor, tuple[torch.Tensor, ...]]


@pytest.fixture(autouse=True)
def in_cpp() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    with forced("cpu"):
        yield
    torch.use_deterministic_algorithms(False)


def make_case(
    name: str,
    lengths: torch.Tensor = RAGGED,
    *,
    size: int = 64,
    group: int = 3,
    columns: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Random keys of these lengths on pages of 16."""
    generator = torch.Generator().manual_seed(1)
    shape = *lengths.shape, int(lengths.max()), size
    tokens = (2 * torch.randn(shape, generator=generator) + 1).to(dtype)
    keys = scattered(tokens, lengths, 16, columns)
    if name == "paged_norms":
        return keys, lengths, ()
    num_events, num_layers, num_heads = lengths.shape
    heads = num_events, num_layers, num_heads * group
    along = torch.randn(*heads, size, generator=generator)
    rows = torch.randn(*heads, size, size, generator=generator)
    return keys, lengths, (along, rows + rows.transpose(-1, -2))


def check(name: str, case: Case) -> torch.Tensor:
    """Compare with the reference; return what the twin found."""
    keys, lengths, given = case
    operation = getattr(operations, name)
    before = operation.calls["cpu"]
    got = operation(keys, lengths, *given)
    assert operation.calls["cpu"] == before + 1 and "dense" not in vars(keys)
    want = operation.reference(keys, lengths, *given)
    assert got.dtype == torch.float32 and got.shape == want.shape
    absolute = PagedTokens.from_dense(keys.dense.abs())
    sizes = operation.reference(absolute, lengths, *(each.abs() for each in given))
    assert ((got - want).abs() <= ROUNDING * sizes).all()
    is_padding = torch.arange(keys.num_tokens) >= lengths[..., None]
    is_padding = is_padding.repeat_interleave(got.shape[2] // lengths.shape[2], 2)
    assert (got[is_padding] == 0).all() and (got[~is_padding] != 0).all()
    del keys.__dict__["dense"]
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("size", [1, 7, 16, 33, 64, 80, 128])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(
    name: str, size: int, columns: bool, dtype: torch.dtype
) -> None:
    check(name, make_case(name, size=size, columns=columns, dtype=dtype))


@pytest.mark.parametrize("group", [1, 8])
def test_groups_of_query_heads(group: int) -> None:
    check("paged_quadratics", make_case("paged_quadratics", group=group))


@pytest.mark.parametrize("name", NAMES)
def test_layers_with_a_pool_each(name: str) -> None:
    keys, lengths, given = make_case(name)
    want = check(name, (keys, lengths, given))
    apart = [pool.clone() for pool in keys.pools]
    assert torch.equal(check(name, (replace(keys, pools=apart), lengths, given)), want)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_alone_has_the_same_results(name: str) -> None:
    keys, lengths, given = make_case(name)
    together = check(name, (keys, lengths, given))
    per_row = together.shape[2] // lengths.shape[2]
    for event, layer, head in ((0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)):
        at = slice(event, event + 1), slice(layer, layer + 1), slice(head, head + 1)
        own = slice(head * per_row, (head + 1) * per_row)
        length = int(lengths[at])
        pages = keys.pages[at][..., : -(-length // 16)]
        alone = PagedTokens(keys.pools[:1], pages, length)
        extra = tuple(each[at[0], at[1], own] for each in given)
        got = check(name, (alone, lengths[at], extra))
        assert torch.equal(got, together[at[0], at[1], own, :length])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(name: str, threads: int) -> None:
    case = make_case(name)
    before, want = torch.get_num_threads(), check(name, case)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(check(name, case), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_head_without_tokens_has_no_values(name: str) -> None:
    keys, _, given = make_case(name, torch.tensor([[[30, 30]]]))
    got = check(name, (keys, torch.tensor([[[0, 20]]]), given))
    assert (got.chunk(2, dim=2)[0] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_keys_that_are_no_numbers_stay_alone(name: str, value: float) -> None:
    lengths = torch.tensor([[[70, 70, 70]]])
    keys, _, given = make_case(name, lengths, size=32)
    want = check(name, (keys, lengths, given))
    tokens = keys.dense.clone()
    tokens[0, 0, 1, 5, 3] = value
    got = getattr(operations, name)(scattered(tokens, lengths, 16), lengths, *given)
    changed = (got != want).view(3, -1, 70).any(1)
    assert changed.nonzero().tolist() == [[1, 5]]
    assert not got.view(3, -1, 70)[1, :, 5].isfinite().any()


def test_what_does_not_fit_is_refused() -> None:
    keys, lengths, given = make_case("paged_quadratics")
    along, matrices = given
    with pytest.raises(ValueError, match="matrices: expected"):
        operations.paged_quadratics(keys, lengths, along, along)
    with pytest.raises(RuntimeError, match="lengths: expected 0 to 150, got 151"):
        operations.paged_norms(keys, lengths + 1)
    with pytest.raises(RuntimeError, match="matrices: expected another dtype"):
        operations.paged_quadratics(keys, lengths, along, matrices.double())
    with pytest.raises(RuntimeError, match="pages: expected room for 161 tokens"):
        operations.paged_norms(replace(keys, num_tokens=161), lengths)
