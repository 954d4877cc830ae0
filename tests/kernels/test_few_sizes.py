"""Small networks of policies on a CPU: oneDNN keeps code for few shapes of theirs."""

import re
from collections.abc import Callable

import pytest
import torch

from vllm_kvpolicy.kernels.chunks import few_sizes
from vllm_kvpolicy.kernels.dms_decision import DecisionWeights, decision_logits
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate_cached
from vllm_kvpolicy.policies.admissions.kvzap.surrogate import surrogate_scores

LAYERS, HEADS, CHANNELS, UNITS, WIDTH = 3, 2, 16, 24, 64
COUNTS = (*range(1, 200, 3), *range(200, 600, 13))
SIZES = 7 + 9
"""Powers of two up to 64, then multiples of 64 up to 640."""
NEW_PRIMITIVE = re.compile(r"^onednn_verbose.*,create:cache_miss", re.M)
Network = Callable[[int], torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def write_gate(dtype: torch.dtype) -> Network:
    shapes = {
        "pre_norm": (CHANNELS,),
        "post_norm": (CHANNELS,),
        "first": (HEADS, UNITS, 2 * CHANNELS),
        "first_bias": (HEADS, UNITS),
        "second": (HEADS, UNITS),
        "second_bias": (HEADS,),
    }
    weights = GateWeights(**{k: drawn(LAYERS, *s) for k, s in shapes.items()})
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("network", [write_gate, surrogate, adapter])
def test_code_is_compiled_for_few_sizes(
    network: Callable[[torch.dtype], Network],
    dtype: torch.dtype,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = network(dtype)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
        for count in COUNTS:
            assert run(count).shape[-1] == count
    # A layer has at most a matrix product, an activation and a change of layout.
    assert len(NEW_PRIMITIVE.findall(capfd.readouterr().out)) <= 4 * SIZES


@pytest.mark.parametrize("network", [write_gate, surrogate, adapter])
def test_each_row_is_as_it_is_alone(
    network: Callable[[torch.dtype], Network],
) -> None:
    run = network(torch.float32)
    whole = run(max(COUNTS))
    for count in (1, 2, 3, 63, 64, 65, 200):
        torch.testing.assert_close(run(count), whole[..., :count], rtol=1e-4, atol=1e-5)


def test_sizes() -> None:
    sizes = {count: few_sizes(torch.ones(2, count, 3)) for count in range(300)}
    assert {len(rows[0]) for rows in sizes.values()} == {
        *(0, 1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320)
    }
    for count, rows in sizes.items():
        assert len(rows[0]) < max(2 * count, 2, count + 64)
        assert rows[:, :count].eq(1).all()
        assert rows[:, count:].eq(0).all()


def test_other_devices_have_their_rows_as_they_are() -> None:
    rows = torch.empty(5, 3, device="meta")
    assert few_sizes(rows) is rows
