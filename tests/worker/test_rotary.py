"""Frequencies recovered from cosine tables: plain, YaRN, short and long tables."""

import math
from types import SimpleNamespace

import pytest
import torch

from vllm_kvpolicy.worker.rotary import model_rope, rope_of_table

HEAD_DIM = 128
TOLERANCE = 1e-6  # relative
LENGTHS = (4096, 40960)


def plain(theta: float) -> torch.Tensor:
    """Return [D/2] float64 frequencies of unscaled RoPE."""
    half = torch.arange(HEAD_DIM // 2, dtype=torch.float64)
    return theta ** (-2 * half / HEAD_DIM)


def yarn(theta: float, factor: float, trained: int) -> torch.Tensor:
    """Return YaRN's frequencies: slow channels divided, fast ones kept, a ramp between.

    From the formula of arXiv 2309.00071, section 3.2, alpha 1 and beta 32.
    """
    frequency = plain(theta)
    turns = trained * frequency / math.tau
    ramp = ((turns - 1) / (32 - 1)).clamp(0, 1)
    return frequency * ramp + frequency / factor * (1 - ramp)


def table(
    frequency: torch.Tensor,
    length: int,
    scaling: float = 1.0,
    angles_in: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return [length, D] float32 cosines and sines.

    Args:
        frequency: [D/2] float64.
        length: positions.
        scaling: factor on both.
        angles_in: models compute angles in float32.
    """
    position = torch.arange(length, dtype=angles_in)
    angles = position[:, None] * frequency.to(angles_in)
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * scaling).float()


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found / want - 1).abs().max())


FREQUENCIES = {
    "theta 1e4": plain(1e4),
    "theta 1e6": plain(1e6),
    "yarn 4x of 1e6": yarn(1e6, 4.0, 32768),
    "yarn 32x of 1e4": yarn(1e4, 32.0, 4096),
}


@pytest.mark.parametrize("angles_in", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", FREQUENCIES)
def test_frequencies_come_back(
    name: str, length: int, angles_in: torch.dtype, record_property
) -> None:
    want = FREQUENCIES[name]
    rope = rope_of_table(table(want, length, angles_in=angles_in))
    record_property("relative error", error(rope.inv_freq, want))
    assert error(rope.inv_freq, want) < TOLERANCE
    assert rope.scaling == pytest.approx(1.0, abs=1e-7)
    assert rope.inv_freq.dtype == torch.float64


@pytest.mark.parametrize("length", LENGTHS)
def test_the_factor_on_both_halves_comes_back(length: int) -> None:
    want, scaling = FREQUENCIES["yarn 4x of 1e6"], 0.1 * math.log(4.0) + 1
    rope = rope_of_table(table(want, length, scaling))
    assert rope.scaling == pytest.approx(scaling, rel=1e-7)
    assert error(rope.inv_freq, want) < TOLERANCE


# Entries of a bfloat16 table are off by up to 2^-9; so are a whole turn's angles.
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.008)], ids=str
)
@pytest.mark.parametrize("length", [*LENGTHS, 1000, 3, 2])
def test_angles_agree_with_the_table_at_every_position(
    length: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Whatever the frequencies are called: rotations are undone as they were done."""
    exact = table(FREQUENCIES["theta 1e6"], length, angles_in=torch.float64)
    rows = exact.to(dtype)
    rope = rope_of_table(rows)
    angles = rope.angles(torch.arange(length))
    cos, sin = rows.double().chunk(2, dim=-1)
    assert float((angles.cos() - cos).abs().max()) < tolerance
    assert float((angles.sin() - sin).abs().max()) < tolerance


def rotary(rows: torch.Tensor, is_neox: bool = True) -> torch.nn.Module:
    """Return what vLLM's rotary embedding looks like to us."""
    module = torch.nn.Module()
    module.register_buffer("cos_sin_cache", rows)
    module.is_neox_style = is_neox
    return module


def model_of(*modules: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleList(modules)


def test_a_model_whose_layers_agree_has_one() -> None:
    rows = table(FREQUENCIES["theta 1e4"], 4096)
    rope = model_rope(model_of(rotary(rows), rotary(rows.clone())), HEAD_DIM)
    assert error(rope.inv_freq, FREQUENCIES["theta 1e4"]) < TOLERANCE


ROWS = SimpleNamespace(
    one=table(FREQUENCIES["theta 1e4"], 64), other=table(FREQUENCIES["theta 1e6"], 64)
)


@pytest.mark.parametrize(
    "modules, message",
    [
        ((), "got a model without RoPE"),
        ((rotary(ROWS.one), rotary(ROWS.other)), "the same RoPE in all layers"),
        ((rotary(ROWS.one, is_neox=False),), "interleaved pairs"),
        ((rotary(ROWS.one[:, ::2]),), "64 of 128 channels"),
    ],
    ids=["none", "two kinds", "neighbouring channels", "part of a head"],
)
def test_other_models_are_refused(modules: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_rope(model_of(*modules), HEAD_DIM)
