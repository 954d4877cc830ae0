"""Write gates against the authors' values, and against a plain loop over tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.made_gates import make_weights
from vllm_kvpolicy.kernels import wgkv_gate
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate, gate_cached, paged_gates
from vllm_kvpolicy.policies.admissions.wgkv import Gates, load

GOLDEN = Path(__file__).parents[1] / "golden" / "wgkv_gate.npz"
CASES = ("llama_a", "llama_b", "qwen3_a", "qwen3_b")
EXPANSION = {"llama": 4.0, "qwen3": 1.5}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as data:
        return dict(data)


def array(golden: dict[str, np.ndarray], case: str, name: str) -> torch.Tensor:
    return torch.from_numpy(golden[f"{case}|{name}"])


def params(golden: dict[str, np.ndarray], case: str) -> dict[str, float]:
    row = list(golden["gate_cases"]).index(case)
    return dict(zip(golden["gate_cols"], golden["gate_params"][row], strict=True))


def weights_of(golden: dict[str, np.ndarray], case: str) -> GateWeights:
    """The weights of the one layer of a case."""
    p = params(golden, case)
    heads, channels = int(p["H"]), int(p["d"])
    tensors = {
        field: array(golden, case, Gates.full_name(0, name))
        for name, field in Gates.NAMES.items()
    }
    tensors["first"] = tensors["first"].view(heads, -1, 2 * channels)
    for field in ("first_bias", "second"):
        tensors[field] = tensors[field].view(heads, -1)
    return GateWeights(**tensors)


@pytest.mark.parametrize("case", CASES)
def test_values_of_the_authors(golden: dict[str, np.ndarray], case: str) -> None:
    weights = weights_of(golden, case)
    units, channels = weights.first.shape[1], weights.pre_norm.shape[0]
    assert units == EXPANSION[case.split("_")[0]] * channels
    before, after = array(golden, case, "k_pre"), array(golden, case, "k_post")
    got = gate(before, after, weights)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got, golden[f"{case}|g"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        got.clamp(min=1e-3), golden[f"{case}|g_clamped"], rtol=1e-4, atol=1e-6
    )
    assert got.min() < 1e-3  # so a clamp would show
    np.testing.assert_array_equal(got > 0.1, golden[f"{case}|admit"])


@pytest.mark.parametrize("case", CASES)
def test_values_in_bfloat16(golden: dict[str, np.ndarray], case: str) -> None:
    weights = weights_of(golden, case).to(torch.device("cpu"), torch.bfloat16)
    keys = (array(golden, case, name).bfloat16() for name in ("k_pre", "k_post"))
    got = gate(*keys, weights)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got, golden[f"{case}|g_bf16"], rtol=0, atol=2e-2)
    exact = golden[f"{case}|g"]
    assert np.abs(got.numpy() - exact).max() > 1e-4  # it is not float32 in disguise
    clear = np.abs(exact - 0.1) > 0.05
    np.testing.assert_array_equal((got > 0.1)[clear], (exact > 0.1)[clear])


@pytest.mark.parametrize("case", CASES)
def test_cached_keys_are_enough(golden: dict[str, np.ndarray], case: str) -> None:
    p = params(golden, case)
    rope = Rope.from_theta(p["rope_theta"], int(p["d"]))
    after, positions = array(golden, case, "k_post"), array(golden, case, "positions")
    before = rope.unrotate(after, positions)
    np.testing.assert_allclose(
        before, golden[f"{case}|k_pre"], rtol=0, atol=2e-6 * before.abs().max()
    )
    got = gate_cached(after, positions, rope, weights_of(golden, case))
    np.testing.assert_allclose(got, golden[f"{case}|g"], rtol=2e-4, atol=1e-6)
    np.testing.assert_array_equal(got > 0.1, golden[f"{case}|admit"])


@pytest.mark.parametrize("case", CASES)
def test_a_released_file_gives_these_values(
    golden: dict[str, np.ndarray], case: str, tmp_path: Path
) -> None:
    names = [Gates.full_name(0, name) for name in Gates.NAMES]
    path = tmp_path / "gates.pt"
    torch.save({name: array(golden, case, name) for name in names}, path)
    weights = GateWeights(**load(path).stacked()).layer(0)
    got = gate(array(golden, case, "k_pre"), array(golden, case, "k_post"), weights)
    np.testing.assert_allclose(got, golden[f"{case}|g"], rtol=1e-4, atol=1e-6)


def test_wrong_positions_show(golden: dict[str, np.ndarray]) -> None:
    p = params(golden, "qwen3_b")
    rope = Rope.from_theta(p["rope_theta"], int(p["d"]))
    after = array(golden, "qwen3_b", "k_post")
    shifted = array(golden, "qwen3_b", "positions") + 1
    got = gate_cached(after, shifted, rope, weights_of(golden, "qwen3_b"))
    assert np.abs(got.numpy() - golden["qwen3_b|g"]).max() > 1e-2


def test_layers_at_once_or_one_by_one() -> None:
    weights = make_weights(layers=3, heads=2, channels=8, units=6)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(3, 2, 9, 8, generator=generator)
    positions = torch.randint(0, 500, (3, 2, 9), generator=generator)
    rope = Rope.from_theta(1e4, 8)
    whole = gate_cached(keys, positions, rope, weights)
    assert whole.shape == (3, 2, 9)
    for layer in range(3):
        one = gate_cached(keys[layer], positions[layer], rope, weights.layer(layer))
        torch.testing.assert_close(whole[layer], one, rtol=1e-5, atol=1e-6)
    assert whole.std(0).min() > 1e-3  # layers differ, so a mix-up would show


class Largest(TorchDispatchMode):
    """Notes the most bytes that one operation wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.most = max(self.most, out.numel() * out.element_size())
            self.calls += "gelu" in str(func)
        return out


@pytest.mark.parametrize(
    ("chunk_bytes", "tokens"), [(1, 1), (4000, 1), (40_000, 16), (10**9, 100)]
)
def test_chunks_bound_what_is_in_memory(
    chunk_bytes: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has one of the few numbers of tokens that are not padded."""
    weights = make_weights(layers=2, heads=2, channels=8, units=16)
    keys = torch.randn(2, 2, 100, 8, generator=torch.Generator().manual_seed(4))
    args = (keys, torch.arange(100), Rope.from_theta(1e4, 8), weights)
    want = gate_cached(*args)
    monkeypatch.setattr(wgkv_gate, "CHUNK_BYTES", chunk_bytes)
    with Largest() as seen:
        got = gate_cached(*args)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    token_bytes = 4 * 4 * (10 * 8 + 3 * 16)
    assert seen.calls == -(-100 // tokens)
    result = got.numel() * 4
    assert seen.most <= max(chunk_bytes, token_bytes, result)


def test_each_token_has_the_gate_of_its_key_and_position() -> None:
    size, units, page = 8, 12, 4
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    pools = [drawn(60, page, size) for _ in range(2)]
    pages = torch.randperm(60, generator=generator).view(2, 2, 3, 5)  # E, L, H, C
    token = torch.randint(0, 20, (2, 2, 3, 7), generator=generator)
    positions = torch.randint(0, 9000, token.shape, generator=generator)
    weights = make_weights(layers=2, heads=3, channels=size, units=units)
    rope = Rope.from_theta(1e4, size)
    keys = PagedTokens(pools, pages, 20)
    got = paged_gates(keys, token, positions, rope, weights)
    assert got.shape == token.shape and got.std() > 0.1
    for event, layer, head, number in torch.cartesian_prod(
        *(torch.arange(each) for each in token.shape)
    ).tolist():
        at = event, layer, head
        place = token[*at, number]
        after = pools[layer][pages[*at, place // page], place % page]
        before = rope.unrotate(after, positions[*at, number])
        own = weights.layer(layer)
        mine = {
            name: t if name.endswith("norm") else t[head : head + 1]
            for name, t in own.tensors().items()
        }
        want = gate(before[None, None], after[None, None], GateWeights(**mine))
        torch.testing.assert_close(got[*at, number], want[0, 0])
