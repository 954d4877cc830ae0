"""Rotations read from a model are those that it makes, whatever module makes them."""

import ast
import math
import sys
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor import models
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.rotary_embedding.ernie45_vl_rope import (
    Ernie4_5_VLRotaryEmbedding,
)

from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.worker.layers import SWITCHES, model_rope, rope_of_table

HEAD_DIM = 128
TOLERANCE = 1e-6  # relative
LENGTHS = (4096, 40960)


def plain(theta: float) -> torch.Tensor:
    """Return [D/2] float64 frequencies of unscaled RoPE."""
    half = torch.arange(HEAD_DIM // 2, dtype=torch.float64)
    return theta ** (-2 * half / HEAD_DIM)


def table(
    frequency: torch.Tensor,
    length: int,
    scaling: float = 1.0,
    angles_in: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return [length, D] float32 cosines and sines of frequencies [D/2] float64.

    Models compute angles in float32.
    """
    position = torch.arange(length, dtype=angles_in)
    angles = position[:, None] * frequency.to(angles_in)
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * scaling).float()


FAST, SLOW = plain(1e4), plain(1e6) / 32  # as what YaRN makes of slow channels


@pytest.mark.parametrize("scaling", [1.0, 0.1 * math.log(4.0) + 1])
@pytest.mark.parametrize("angles_in", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("want", [FAST, SLOW], ids=["fast", "slow"])
def test_frequencies_and_their_factor_come_back(
    want: torch.Tensor, length: int, angles_in: torch.dtype, scaling: float
) -> None:
    rope = rope_of_table(table(want, length, scaling, angles_in))
    assert float((rope.inv_freq / want - 1).abs().max()) < TOLERANCE
    assert rope.scaling == pytest.approx(scaling, rel=1e-7)
    assert rope.inv_freq.dtype == torch.float64


# Entries of a bfloat16 table are off by up to 2^-9; so are a whole turn's angles.
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.008)], ids=str
)
@pytest.mark.parametrize("length", [*LENGTHS, 1000, 3, 2])
def test_angles_agree_with_the_table_at_every_position(
    length: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Whatever the frequencies are called: rotations are undone as they were done."""
    rows = table(plain(1e6), length, angles_in=torch.float64).to(dtype)
    angles = rope_of_table(rows).angles(torch.arange(length))
    cos, sin = rows.double().chunk(2, dim=-1)
    assert float((angles.cos() - cos).abs().max()) < tolerance
    assert float((angles.sin() - sin).abs().max()) < tolerance


SIZE, LENGTH = 64, 200
SCALED = {"factor": 4.0, "original_max_position_embeddings": 50, "rope_theta": 5e4}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 50,
    "short_factor": [1.0 + i / 8 for i in range(24)],
    "long_factor": [2.0 + i / 4 for i in range(24)],
    "partial_rotary_factor": 0.75,
}
SECTIONS = {"mrope_section": [8, 12, 12]}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What vLLM makes of each set of parameters; classes of which there are several are
# named by what is special about them.
OF_VLLM: dict[str, dict[str, Any]] = {
    "RotaryEmbedding": {"rope_theta": 1e6},
    "RotaryEmbedding neighbours": {"is_neox_style": False},
    "RotaryEmbedding part": {"partial_rotary_factor": 0.25},
    "RotaryEmbedding part neighbours": {
        "partial_rotary_factor": 0.5,
        "is_neox_style": False,
    },
    "LinearScalingRotaryEmbedding": {"rope_type": "linear", "factor": 3.0},
    "NTKScalingRotaryEmbedding": {"rope_type": "ntk", "factor": 3.0},
    "DynamicNTKScalingRotaryEmbedding": {"rope_type": "dynamic", "factor": 3.0},
    "DynamicNTKAlphaRotaryEmbedding": {"rope_type": "dynamic", "alpha": 1e3},
    "Llama3RotaryEmbedding": {"rope_type": "llama3", **SCALED, **LLAMA3},
    "YaRNScalingRotaryEmbedding": {"rope_type": "yarn", **SCALED},
    "YaRNScalingRotaryEmbedding part neighbours": {
        "rope_type": "yarn",
        "partial_rotary_factor": 0.5,
        "is_neox_style": False,
        **SCALED,
    },
    "DeepseekScalingRotaryEmbedding": {
        "rope_type": "deepseek_yarn",
        "mscale": 2.0,
        "is_neox_style": False,
        **SCALED,
    },
    "Phi3LongRoPEScaledRotaryEmbedding": LONG,
    "Phi3LongRoPEScaledRotaryEmbedding short": LONG,
    "Gemma4RotaryEmbedding": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
    },
    "MRotaryEmbedding": SECTIONS,
    "MRotaryEmbedding interleaved": {**SECTIONS, "mrope_interleaved": True},
    "MRotaryEmbeddingInterleaved": {
        "rope_type": "openpangu",
        "mrope_interleaved": True,
        **SECTIONS,
    },
    "BailingMRotaryEmbedding": {
        "rope_type": "bailing_mrope",
        "mrope_section": [8, 12, 12],
        "is_neox_style": False,
    },
    "Ernie4_5_VLRotaryEmbedding": {"mrope_section": [12, 12, 8]},
}
# Refused by the table of guards: none of them runs on a CPU, or in such a layer.
REFUSED_EARLIER = {
    "DualChunkRotaryEmbedding",
    "DeepseekV4ScalingRotaryEmbedding",
    "Llama4VisionRotaryEmbedding",
    "FourierRotaryEmbedding",
}


class Layer(nn.Module):
    """An attention layer, as far as the reading of rotations looks."""

    head_size = SIZE

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.ones(1))


def attention(embedding: nn.Module | None, **switches: bool) -> nn.Module:
    """Return a module with an attention layer `attn` beside a rotary embedding."""
    module = nn.Module()
    module.attn, module.rotary_emb = Layer(), embedding
    vars(module).update(switches)
    return module


def read(*modules: nn.Module) -> Rope:
    return model_rope(nn.ModuleList(modules), [module.attn for module in modules])


def make(name: str, policy_config: Any) -> nn.Module:
    """Return a rotary embedding of vLLM's."""
    from vllm.config import set_current_vllm_config

    parameters = dict(OF_VLLM[name])
    is_neox = parameters.pop("is_neox_style", True)
    longest = policy_config.model_config.max_model_len
    policy_config.model_config.max_model_len = 50 if name.endswith("short") else 1000
    try:
        with set_current_vllm_config(policy_config):
            if name.startswith("Ernie"):
                plain = SIZE, SIZE, LENGTH, 1e4, is_neox, torch.float32
                return Ernie4_5_VLRotaryEmbedding(*plain, **parameters)
            return get_rope(SIZE, LENGTH, is_neox, parameters, torch.float32)
    finally:
        policy_config.model_config.max_model_len = longest


def rotate(rope: Rope, layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Rotate rows [T, D] of one layer to positions 0, 1, 2..."""
    angle = rope.by_layer(rope.angles(torch.arange(len(rows))))
    scaling = rope.scaling
    if isinstance(scaling, torch.Tensor):
        scaling = rope.by_layer(scaling)
    layer %= angle.shape[1]
    cos, sin = ((scaling * part)[:, layer] for part in (angle.cos(), angle.sin()))
    if rope.order is None:
        order = torch.arange(SIZE)
    else:
        order = rope.order[rope.of_layer[layer]]
    first, second = rows[:, order].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.zeros_like(turned).index_copy_(1, order, turned)


def random_rows(length: int = 50) -> torch.Tensor:
    return torch.randn(length, SIZE, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", OF_VLLM)
def test_rotations_are_those_of_vllms_modules(name: str, policy_config: Any) -> None:
    embedding = make(name, policy_config)
    assert type(embedding).__name__ == name.split()[0]
    rows = random_rows()
    shape = (-1, 1, SIZE) if name.startswith("Deepseek") else (-1, SIZE)
    query, key = rows.clone().view(shape), rows.flip(0).view(shape)
    # Ernie's class has no forward pass on a CPU; LongRoPE's has no name for it.
    turn = getattr(embedding, "forward_native", embedding.forward)
    got = turn(torch.arange(len(rows)), query, key)
    rope = read(attention(embedding), attention(embedding))
    for given, want in zip((rows, rows.flip(0)), got, strict=True):
        torch.testing.assert_close(
            rotate(rope, 1, given).float(), want.view_as(rows), rtol=0, atol=3e-5
        )


def test_every_rotary_embedding_of_vllm_is_here() -> None:
    package = rotary_embedding.__name__
    names = [each.name for each in iter_modules(rotary_embedding.__path__)]
    classes = {
        item.__name__
        for name in names
        for item in vars(import_module(f"{package}.{name}")).values()
        if isinstance(item, type) and "RotaryEmbedding" in item.__name__
    }
    known = {name.split()[0] for name in OF_VLLM} | REFUSED_EARLIER
    assert classes - {"RotaryEmbeddingBase"} == known


YARN = {"rope_type": "yarn", **SCALED}
# Model of Transformers, and the rotation of its layers of full attention.
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {"rope_type": "default", "rope_theta": 1e6},
    "seed_oss": YARN,
    "gpt_neox": {"rope_type": "default", "partial_rotary_factor": 0.25},
    "cohere": {"rope_type": "default"},
    "glm": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "olmo3": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
}


def of_transformers(kind: str) -> nn.Module:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    config.hidden_size, config.num_attention_heads = 4 * SIZE, 4
    config.head_dim = SIZE
    parameters = deepcopy(OF_TRANSFORMERS[kind])
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and "rope_type" in each:
            each.setdefault("rope_theta", 1e4)
    config.rope_parameters = parameters
    source = import_module(f"transformers.models.{kind}.modeling_{kind}")
    (embedding,) = [
        item for name, item in vars(source).items() if name.endswith("RotaryEmbedding")
    ]
    return embedding(config)


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_rotations_are_those_of_transformers(kind: str) -> None:
    """One module above the layers, as vLLM's Transformers backend has it."""
    embedding, rows = of_transformers(kind), random_rows()
    types = ["full_attention"] if kind == "olmo3" else []
    cos, sin = embedding(rows[None], torch.arange(len(rows))[None], *types)
    source = import_module(type(embedding).__module__)
    width = cos.shape[-1]
    turned, _ = source.apply_rotary_pos_emb(
        *[rows[None, None, :, :width]] * 2, cos, sin
    )
    layers = nn.ModuleList([attention(None, use_rope=True) for _ in range(2)])
    model = attention(embedding)
    model.layers = layers
    rope = model_rope(model, [module.attn for module in layers])
    want = torch.cat([turned[0, 0], rows[:, width:]], -1)
    torch.testing.assert_close(rotate(rope, 1, rows).float(), want, rtol=0, atol=3e-5)


def test_layers_with_several_rotations(policy_config: Any) -> None:
    """Neighbours, halves of another base, and none: no module, or one that rests."""
    names = ("RotaryEmbedding neighbours", "RotaryEmbedding", "RotaryEmbedding part")
    made = [make(name, policy_config) for name in names]
    still = [attention(None), attention(made[0], use_rope=False)]
    rope = read(*still, *map(attention, made), attention(made[0]))
    assert rope.inv_freq.shape == (4, SIZE // 2)
    rows = random_rows()
    for layer, embedding in enumerate([None, None, *made, made[0]]):
        got = rotate(rope, layer, rows).float()
        want = rows
        if embedding is not None:
            want, _ = embedding.forward_native(torch.arange(len(rows)), rows.clone())
        torch.testing.assert_close(got, want, rtol=0, atol=3e-5)


def test_layers_that_rotate_alike_have_the_plain_form(policy_config: Any) -> None:
    plain = make("RotaryEmbedding", policy_config)
    rope = read(attention(plain), attention(deepcopy(plain)))
    assert rope.inv_freq.shape == (SIZE // 2,) and rope.scaling == pytest.approx(1.0)
    assert rope.of_layer is None and rope.order is None
    resting = read(attention(plain, v1=False), attention(None))
    assert resting.inv_freq.shape == (SIZE // 2,) and not resting.inv_freq.any()


def test_what_lets_layers_of_vllm_rest_is_known() -> None:
    """Attributes that decide about a call of `rotary_emb` in any of its models."""
    names = set[str]()
    for path in Path(models.__path__[0]).glob("*.py"):
        if "self.rotary_emb(" not in (text := path.read_text()):
            continue
        for branch in ast.walk(ast.parse(text)):
            if isinstance(branch, ast.If) and "self.rotary_emb(" in ast.unparse(branch):
                tested = ast.walk(branch.test)
                names |= {
                    each.attr for each in tested if isinstance(each, ast.Attribute)
                }
    windows, either_way = {"sliding_window"}, {"is_kv_shared_layer", "hpc_rope_norm"}
    hybrids = {"config", "use_mem_rope"}
    assert names == {*SWITCHES, "rotary_emb", *windows, *either_way, *hybrids}


def test_a_rotation_of_another_kind_is_refused_by_name() -> None:
    embedding = nn.Module()
    embedding.head_size = SIZE
    embedding.register_buffer("cos_sin_cache", torch.ones(9, 2 * SIZE))  # as FoPE's
    with pytest.raises(ValueError, match="frequencies of its own, got Module"):
        read(attention(embedding))


def test_a_layer_without_a_rotary_embedding_known_by_name_is_refused() -> None:
    """Its model may well rotate, in a module that is called otherwise."""
    other = attention(None)
    del other.rotary_emb
    with pytest.raises(ValueError, match="expected a module 'rotary_emb' beside or ab"):
        read(other)
    vars(other)["use_rope"] = False
    assert not read(other).inv_freq.any()


def test_a_turn_with_other_parameters_is_refused(monkeypatch) -> None:
    embedding = of_transformers(next(iter(OF_TRANSFORMERS)))
    source = sys.modules[type(embedding).__module__]
    monkeypatch.setattr(source, "apply_rotary_pos_emb", lambda only: only)
    with pytest.raises(ValueError, match="frequencies of its own, got"):
        read(attention(embedding))
