"""Write gates in Triton against their reference.

Slots that hold no key hold NaN. Tolerances: float32 sums of up to 512 products in
another order, sines and cosines in float32. In half precision the reference rounds
hidden units and logits, which the twin does not; it must then be as near to gates in
float32, of the same rounded keys and weights, as the reference is.
"""

from dataclasses import replace

import pytest
import torch

from support.scattered_pages import Make, far_away, scattered
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.triton import wgkv_gate as twin
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, paged_gates

HALF, FULL = torch.float16, torch.float32
LENGTHS = torch.tensor([[[150, 1], [64, 65]], [[128, 17], [63, 2]]])  # E, L, H = 2
Case = tuple[PagedTokens, torch.Tensor, torch.Tensor, Rope, GateWeights]

SLOWER = ((64, 256), (80, 120), (128, 192), (256, 40))  # sizes and units


def make_case(
    size: int = 32,
    units: int = 48,
    *,
    count: int = 20,
    page: int = 16,
    dtype: torch.dtype = FULL,
    columns: bool = False,
) -> Case:
    """Random keys and gates; tokens of each row in any order, some of them twice."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    keys = (3 * drawn(2, 2, 2, 150, size)).to(dtype)
    paged = scattered(keys, LENGTHS, page, columns)
    picked = torch.rand(2, 2, 2, count, generator=generator)
    token = (picked * LENGTHS[..., None]).long()
    positions = token + torch.tensor([0, 99_000]).view(2, 1, 1, 1)
    weights = GateWeights(
        1 + 0.2 * drawn(2, size),
        1 + 0.2 * drawn(2, size),
        drawn(2, 2, units, 2 * size) * size**-0.5,
        drawn(2, 2, units),
        drawn(2, 2, units) * units**-0.5,
        drawn(2, 2),
    )
    rope = Rope.from_theta(5e5, size)
    return paged, token, positions, rope, weights.to(keys.device, dtype)


def run(case: Case) -> torch.Tensor:
    """Run the twin through its operation."""
    before = paged_gates.calls["triton"]
    gates = paged_gates(*case)
    assert paged_gates.calls["triton"] == before + 1
    return gates


def check(case: Case) -> torch.Tensor:
    """Compare with the reference; return the twin's."""
    got, want = run(case), paged_gates.reference(*case)
    assert got.dtype == FULL and got.shape == case[1].shape and got.std() > 0.05
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6)
    return got


@pytest.mark.parametrize(
    ("size", "units"),
    [
        *((8, 32), (32, 48), (80, 40)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOWER),
    ],
)
def test_equals_the_reference(size: int, units: int) -> None:
    check(make_case(size, units))


@pytest.mark.parametrize("units", [1, 15, 64, 65])
def test_any_number_of_units(units: int) -> None:
    check(make_case(units=units))


@pytest.mark.parametrize("size", [32, 128])
def test_half_precision(size: int) -> None:
    case = make_case(size, 128, dtype=HALF)
    keys, weights = replace(case[0], pools=[p.float() for p in case[0].pools]), case[4]
    weights = weights.to(keys.device, FULL)
    exact = paged_gates.reference(keys, *case[1:4], weights)
    off = (run(case) - exact).abs()
    reference_off = (paged_gates.reference(*case) - exact).abs()
    assert 0 < off.max() <= 1.5 * reference_off.max() < 0.01
    assert off.mean() < reference_off.mean()


@pytest.mark.parametrize("page", [16, 100])
@pytest.mark.parametrize("columns", [False, True])
def test_pages(page: int, columns: bool) -> None:
    want = check(make_case())
    assert torch.equal(run(make_case(page=page, columns=columns)), want)


@pytest.mark.parametrize("count", [0, 1, 64, 65])
def test_any_number_of_tokens(count: int) -> None:
    case = make_case()
    token, positions = (each.repeat(1, 1, 1, 4)[..., :count] for each in case[1:3])
    got = run((case[0], token, positions, *case[3:]))
    want = run(case).repeat(1, 1, 1, 4)[..., :count]
    # The interpreter's products are BLAS's, which on some processors adds a row up in
    # an order that follows from the row's place in its tile.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_layers_with_a_pool_each() -> None:
    case = make_case()
    keys, want = case[0], check(case)
    copy = keys.pools[0].transpose(0, 1).contiguous().transpose(0, 1)
    apart = [keys.pools[0], copy]
    assert apart[0].stride() != apart[1].stride()
    assert torch.equal(run((replace(keys, pools=apart), *case[1:])), want)


def test_a_row_alone_has_the_same_results() -> None:
    keys, token, positions, rope, weights = case = make_case()
    together = run(case)
    part = slice(1, 2)
    for layer in (0, 1):
        only = slice(layer, layer + 1)
        fields = weights.tensors().items()
        mine = {
            name: t[only] if name.endswith("norm") else t[only, part]
            for name, t in fields
        }
        alone = PagedTokens(keys.pools[only], keys.pages[part, only, part], 150)
        at = part, only, part
        got = run((alone, token[at], positions[at], rope, GateWeights(**mine)))
        assert torch.equal(got, together[at])


@pytest.mark.slow
def test_scaled_rotations() -> None:
    case = make_case()
    want = check(case)
    longer = replace(case[3], scaling=1.4)
    got = check((*case[:3], longer, case[4]))
    # The norm takes the factor away again.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_broken_key_stays_by_itself() -> None:
    case = make_case()
    want, (keys, token) = run(case), case[:2]
    place = token[0, 1, 0, 3]
    keys.pools[0][keys.pages[0, 1, 0, place // 16], place % 16, 5] = torch.nan
    got = run(case)
    is_broken = torch.zeros_like(got, dtype=torch.bool)
    is_broken[0, 1, 0] = token[0, 1, 0] == place
    assert got[is_broken].isnan().all()
    assert torch.equal(got[~is_broken], want[~is_broken])


def test_shapes_are_checked() -> None:
    keys, token, positions, rope, weights = make_case()
    for wrong in (
        (keys, token[:1], positions[:1], rope, weights),
        (keys, token, positions[..., :1], rope, weights),
        (keys, token, positions, rope, weights.layer(0)),
        (keys, token, positions, rope, replace(weights, first=weights.first[:, :1])),
    ):
        for call in (twin.paged_gates, paged_gates.reference):
            with pytest.raises(ValueError, match="expected"):
                call(*wrong)


def test_pages_beyond_int32_are_read(unbacked: Make) -> None:
    case = make_case(dtype=HALF)
    far = far_away(case[0], unbacked), *case[1:]
    assert torch.equal(run(far), run(case))
