"""Small networks of policies on a CPU: oneDNN keeps code for few shapes of theirs."""

import re
from collections.abc import Callable

import pytest
import torch

from support.made_gates import make_weights
from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels import dms_decision, wgkv_gate
from vllm_kvpolicy.kernels.chunks import few_sizes, last_size, next_size
from vllm_kvpolicy.kernels.dms_decision import DecisionWeights, decision_logits
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import gate_cached
from vllm_kvpolicy.policies.admissions import kvzap
from vllm_kvpolicy.policies.admissions.kvzap import surrogate_scores

LAYERS, HEADS, CHANNELS, UNITS, WIDTH = 3, 2, 16, 24, 64
COUNTS = range(1, 400)
MOST = 4 * (6 + 8 + 8 + 6)
"""A layer has at most a matrix product, an activation and a change of layout; numbers
of rows are 1 to 32, 64 to 120, 128 to 240, and 256 to 416."""
NEW_PRIMITIVE = re.compile(r"^onednn_verbose.*,create:cache_miss", re.M)
Network = Callable[[int], torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def write_gate(dtype: torch.dtype) -> Network:
    weights = make_weights(LAYERS, HEADS, CHANNELS, UNITS)
    weights, rope = weights.to(torch.device("cpu"), dtype), Rope.from_theta(1e4, 16)
    keys = drawn(LAYERS, HEADS, max(COUNTS), CHANNELS).to(dtype)

    def run(count: int) -> torch.Tensor:
        return gate_cached(keys[:, :, :count], torch.arange(count), rope, weights)

    return run


def surrogate(dtype: torch.dtype) -> Network:
    sizes = ((UNITS, WIDTH), (HEADS, UNITS))
    linears = [(drawn(*s).to(dtype), drawn(s[0]).to(dtype)) for s in sizes]
    hidden = drawn(max(COUNTS), WIDTH).to(dtype)
    return lambda count: surrogate_scores(hidden[:count], linears).T


def adapter(dtype: torch.dtype) -> Network:
    weights = DecisionWeights(drawn(WIDTH).to(dtype), drawn(HEADS, WIDTH).to(dtype))
    hidden = drawn(max(COUNTS), WIDTH).to(dtype)
    return lambda count: decision_logits(hidden[:count], weights, 1e-6, 1.0, 0.0).T


def compiled(run: Network, capfd: pytest.CaptureFixture[str]) -> int:
    """Return how many primitives oneDNN compiles for all COUNTS."""
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        for count in COUNTS:
            assert run(count).shape[-1] == count
    return len(NEW_PRIMITIVE.findall(capfd.readouterr().out))


@pytest.mark.parametrize(
    ("network", "dtype"),
    [
        (write_gate, torch.float32),
        (write_gate, torch.bfloat16),
        (surrogate, torch.float32),
        (surrogate, torch.bfloat16),
        (adapter, torch.bfloat16),  # in float32 it has products alone, of no oneDNN
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_code_is_compiled_for_few_sizes(
    network: Callable[[torch.dtype], Network],
    dtype: torch.dtype,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = network(dtype)
    assert compiled(run, capfd) <= MOST
    for user in (wgkv_gate, dms_decision, kvzap):
        monkeypatch.setattr(user, "few_sizes", lambda rows: rows)
    is_of_onednn = dtype is torch.float32 or compat.multiplies_bfloat16()
    assert (compiled(run, capfd) > MOST) == is_of_onednn


@pytest.mark.parametrize("network", [write_gate, surrogate, adapter])
def test_each_row_is_as_it_is_alone(network: Callable[[torch.dtype], Network]) -> None:
    run = network(torch.float32)
    whole = run(max(COUNTS))
    for count in (1, 2, 3, 63, 64, 65, 200):
        torch.testing.assert_close(run(count), whole[..., :count], rtol=1e-4, atol=1e-5)


def test_sizes() -> None:
    sizes = {count: few_sizes(torch.ones(2, count, 3)) for count in range(300)}
    assert {len(rows[0]) for rows in sizes.values()} == {
        *(0, 1, 2, 4, 8, 16, 32),
        *range(64, 128, 8),
        *range(128, 256, 16),
        *(256, 288, 320),
    }
    for count, rows in sizes.items():
        assert rows[:, :count].eq(1).all()
        assert rows[:, count:].eq(0).all()


def test_sizes_are_few_and_near() -> None:
    sizes = {next_size(count) for count in range(32 * 1024 + 1)}
    assert len(sizes) == 80
    last = 0
    for count in range(32 * 1024):
        last = count if count in sizes else last
        assert last_size(count) == last
        assert count <= next_size(count) <= max(1, 2 * count)
        assert count < 64 or next_size(count) <= 1.125 * count


def test_other_devices_have_their_rows_as_they_are() -> None:
    rows = torch.empty(5, 3, device="meta")
    assert few_sizes(rows) is rows
