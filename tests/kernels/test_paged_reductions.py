"""Lengths, cosines, projections and squares of paged keys against loops in float64.

Tolerances: a float32 sum of up to 80 products is off by a few units in the last place
of the sum of their sizes.
"""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced
from support.twins_of_reductions import further
from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.paged_reductions import (
    paged_cosines,
    paged_norms,
    paged_pair_projections,
    paged_projections,
    paged_quadratics,
)

EVENTS, LAYERS, HEADS, GROUP, TOKENS = 2, 2, 2, 3, 37
LENGTHS = torch.tensor([[[37, 1], [20, 33]], [[36, 2], [37, 16]]])
ROUNDING = 1e-6  # of the sum of the sizes of all terms


@pytest.fixture(autouse=True)
def by_reference() -> Iterator[None]:
    with forced("reference"):
        yield


def make_keys(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random keys [E, L, H, T, D]; padding holds NaN and infinity."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(EVENTS, LAYERS, HEADS, TOKENS, size, generator=generator)
    is_padding = torch.arange(TOKENS) >= LENGTHS[..., None]
    keys[is_padding] = torch.nan
    keys[..., -1, 0][is_padding[..., -1]] = torch.inf
    return (3 * keys).to(dtype)


def norms(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths of one row's keys [n, D], and the sizes of all terms."""
    length = torch.stack([sum(x * x for x in key) ** 0.5 for key in keys])
    return length, length


def cosines(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    unit = torch.stack([key / norms(key[None])[0] for key in keys])
    mean = sum(unit) / norms(sum(unit)[None])[0]
    return projections(unit, mean)[0], torch.ones(len(keys))


def projections(
    keys: torch.Tensor, along: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    terms = torch.stack([key * along for key in keys])
    return terms.sum(-1), terms.abs().sum(-1)


def pair_projections(
    keys: torch.Tensor, along: torch.Tensor, by_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    half = keys.shape[-1] // 2
    pairs = torch.stack([norms(key.view(2, half).T)[0] for key in keys])
    straight, sizes = projections(keys, along)
    by_pair, more = projections(pairs, by_length)
    return straight + by_pair, sizes + more


def quadratics(
    keys: torch.Tensor, along: torch.Tensor, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    straight, sizes = projections(keys, along)
    terms = torch.stack([torch.outer(key, key) * matrix for key in keys])
    return straight + terms.sum((1, 2)), sizes + terms.abs().sum((1, 2))


CASES: dict[str, tuple[Operation, Callable]] = {
    "paged_norms": (paged_norms, norms),
    "paged_cosines": (paged_cosines, cosines),
    "paged_projections": (paged_projections, projections),
    "paged_pair_projections": (paged_pair_projections, pair_projections),
    "paged_quadratics": (paged_quadratics, quadratics),
}


def run(name: str, keys: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """Run the reference through its operation."""
    operation, before = CASES[name][0], CASES[name][0].calls["reference"]
    result = operation(PagedTokens.from_dense(keys), LENGTHS, *given)
    assert operation.calls["reference"] == before + 1
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 80])
@pytest.mark.parametrize("name", CASES)
def test_equals_loops(name: str, size: int, dtype: torch.dtype) -> None:
    keys, given = make_keys(size, dtype), further(LENGTHS, size, GROUP)[name]
    got = run(name, keys, *given)
    per_row = GROUP if name in ("paged_pair_projections", "paged_quadratics") else 1
    assert got.dtype == torch.float32
    assert got.shape == (EVENTS, LAYERS, HEADS * per_row, TOKENS)
    for e, layer, head in product(range(EVENTS), range(LAYERS), range(got.shape[2])):
        row = e, layer, head // per_row
        length = LENGTHS[row]
        own = [part[e, layer, head].double() for part in given]
        want, sizes = CASES[name][1](keys[row][:length].double(), *own)
        off = (got[e, layer, head, :length] - want).abs()
        assert (off <= ROUNDING * sizes).all()
        assert (got[e, layer, head, length:] == 0).all()


@pytest.mark.parametrize("name", CASES)
def test_neither_chunks_nor_pages_change_a_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, given = make_keys(16, torch.bfloat16), further(LENGTHS, 16, GROUP)[name]
    want = run(name, keys, *given)
    padded = torch.nn.functional.pad(keys, (0, 0, 0, 3)).view(-1, 8, 16)  # five pages
    order = torch.randperm(len(padded), generator=torch.Generator().manual_seed(2))
    pool = torch.empty_like(padded)
    pool[order] = padded
    pages = order.view(*LENGTHS.shape, 5)
    paged = PagedTokens([pool] * LAYERS, pages, TOKENS)
    assert torch.equal(CASES[name][0](paged, LENGTHS, *given), want)
    monkeypatch.setattr(chunks, "CPU_CHUNK_BYTES", 1)
    assert torch.equal(run(name, keys, *given), want)


@pytest.mark.parametrize("name", CASES)
def test_keys_of_zeros_have_no_direction(name: str) -> None:
    keys = torch.zeros(EVENTS, LAYERS, HEADS, TOKENS, 16)
    assert (run(name, keys, *further(LENGTHS, 16, GROUP)[name]) == 0).all()


def test_cosines_reach_both_ends() -> None:
    keys = torch.ones(EVENTS, LAYERS, HEADS, TOKENS, 16)
    keys[:, :, :, 1::3] *= -7.0  # fewer than those of the other sign
    want = torch.where(torch.arange(TOKENS) % 3 == 1, -1.0, 1.0).expand(keys.shape[:4])
    want = want.masked_fill(torch.arange(TOKENS) >= LENGTHS[..., None], 0.0)
    got = run("paged_cosines", keys)
    at = LENGTHS != 2  # a key and its opposite have no mean
    torch.testing.assert_close(got[at], want[at])
    assert (got[~at] == 0).all()


def test_refuses_shapes_that_do_not_fit() -> None:
    keys = PagedTokens.from_dense(make_keys(16, torch.float32))
    along, by_length = further(LENGTHS, 16, GROUP)["paged_pair_projections"]
    with pytest.raises(ValueError, match="directions: expected"):
        paged_projections(keys, LENGTHS, along)
    for wrong in (along[:, :, :-1], along[..., :-1]):
        with pytest.raises(ValueError, match="directions: expected"):
            paged_pair_projections(keys, LENGTHS, wrong, by_length)
    with pytest.raises(ValueError, match="by_length: expected"):
        paged_pair_projections(keys, LENGTHS, along, by_length.repeat(1, 1, 1, 2))
    odd = PagedTokens.from_dense(make_keys(15, torch.float32))
    with pytest.raises(ValueError, match="keys: expected an even head size, got 15"):
        paged_pair_projections(odd, LENGTHS, along[..., :15], by_length[..., :7])
    with pytest.raises(ValueError, match="matrices: expected"):
        paged_quadratics(keys, LENGTHS, along, by_length)
