"""Kinds of attention layers: what vLLM has is served, or refused before weights."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.engine_configs import Overlay, engine_args
from support.made_drafters import make_llama
from vllm_kvpolicy.api.guards import REFUSALS, refusals
from vllm_kvpolicy.sizes import kv_heads, other_groups, own_block_size

FULL, SLIDING = "full_attention", "sliding_attention"
OWN = "attention layers of a model's own"
OTHER_DRAFTS = next(row.name for row in REFUSALS if "draft models" in row.name)


@pytest.mark.parametrize("layer_types", [None, [SLIDING] * 2])
@pytest.mark.parametrize(("window", "is_refused"), [(4096, False), (4095, True)])
def test_a_window_that_no_request_outgrows_is_full_attention(
    tiny_model, layer_types, window, is_refused
):
    """Phi-4-mini has one of 262,144 tokens, twice its context, and no `layer_types`."""
    args = engine_args(
        tiny_model,
        additional_config={"kv_policy": {"policy": "tova"}},
        hf_overrides={"sliding_window": window, "layer_types": layer_types},
    )
    if is_refused:
        with pytest.raises(ValueError, match="sliding windows in every layer"):
            args.create_engine_config()
    else:
        config = args.create_engine_config()
        assert config.cache_config.sliding_window is None
        assert other_groups(config).count == 0


def gemma4(policy_config, **changes):
    """Return a VllmConfig of a model as its config.json says."""
    from transformers import Gemma4TextConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        Gemma4ModelArchConfigConvertor,
    )

    fields = {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
    fields |= {"head_dim": 32, "num_key_value_heads": 2, "attention_k_eq_v": True}
    text = Gemma4TextConfig(**{**fields, **changes})
    arch = Gemma4ModelArchConfigConvertor(text, text).convert()
    return of_model(policy_config, text, arch)


def of_model(policy_config, text, arch):
    """Return a VllmConfig of a model, by its own configuration and what vLLM reads."""
    model = {"hf_text_config": text, "model_arch_config": arch}
    return Overlay(policy_config, {f"model_config.{k}": v for k, v in model.items()})


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"global_head_dim": 32}, (32, 32)),
        ({"global_head_dim": 64}, (32, 64)),
        ({"global_head_dim": 32, "num_global_key_value_heads": 1}, (64, 32)),
        ({"global_head_dim": 96, "num_global_key_value_heads": 1}, None),
        ({"per_layer_config": {0: {"head_dim": 64}}}, None),
    ],
)
def test_layers_of_two_head_sizes(policy_config, changes, sizes):
    """Gemma 4: layers that keep less of a token have longer superblocks, if they can.

    The sizes are of full attention, and of windows.
    """
    config = gemma4(policy_config, **changes)
    reasons = refusals(config)
    unlike = [each for each in reasons if "layers that differ in heads" in each]
    assert bool(unlike) == (sizes is None)
    if sizes:
        assert (own_block_size(config), other_groups(config).block_size) == sizes


@pytest.mark.parametrize(
    ("size", "reason"), [(128, "values of another size than keys"), (192, None)]
)
def test_values_of_another_size(policy_config, size, reason):
    """MiMo-V2-Flash: its values have 128 channels, its keys 192."""
    from transformers import MiMoV2FlashConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        MimoV2ModelArchConfigConvertor,
    )

    kinds = [0, 1, 1, 1, 1, 0]
    fields = {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 8}
    fields |= {"swa_head_dim": 192, "swa_v_head_dim": size, "v_head_dim": size}
    fields |= {"hybrid_layer_pattern": kinds, "sliding_window_size": 128}
    text = MiMoV2FlashConfig(num_hidden_layers=6, **fields)
    arch = MimoV2ModelArchConfigConvertor(text, text).convert()
    config = of_model(policy_config, text, arch)
    found = refusals(config)
    assert [each.startswith(reason or "") for each in found] == [True] * bool(reason)
    assert kv_heads(config) == (4, 192) and kv_heads(config, SLIDING) == (8, 192)
    assert (own_block_size(config), other_groups(config).block_size) == (64, 32)
    assert (other_groups(config).num_full, other_groups(config).count) == (2, 2)


@pytest.mark.parametrize("size", [32, 64])
def test_flashinfer_is_refused_beside_heads_of_two_sizes(policy_config, size):
    """Superblocks of the smaller heads have more tokens than its kernels take."""
    backend = {"attention_config.backend": SimpleNamespace(name="FLASHINFER")}
    config = Overlay(gemma4(policy_config, global_head_dim=size), backend)
    refused = any(
        each.startswith("FlashInfer with layers") for each in refusals(config)
    )
    assert refused == (size != 32)


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"v_head_dim": [64, 64]}, None),  # of a model that does not read it
        ({"sliding_windows": 48}, None),
        ({"num_attention_heads_per_layer": [4, 4]}, None),
        ({"num_attention_heads_per_layer": [8, 8]}, "layers that differ in heads"),
        (
            {"block_configs": [{"attention": {"n_heads_in_group": n}} for n in (1, 2)]},
            "layers that differ in heads",
        ),
    ],
)
def test_fields_come_in_several_forms(policy_config, fields, row):
    text = policy_config.model_config.hf_text_config
    changed = type(text)(**{**text.to_dict(), "layer_types": [FULL, FULL], **fields})
    found = refusals(Overlay(policy_config, {"model_config.hf_text_config": changed}))
    assert [each for each in found if row and each.startswith(row)] == found
    assert bool(found) == bool(row)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
def test_drafters_have_windows_of_their_own(tmp_path, kind, layer_type):
    """Whatever the model itself has."""
    target, drafter = make_llama(tmp_path, kind)
    config = json.loads((drafter / "config.json").read_text())
    config |= {"layer_types": [layer_type], "sliding_window": 48}
    (drafter / "config.json").write_text(json.dumps(config))
    speculative = {"method": kind, "model": str(drafter), "num_speculative_tokens": 3}
    changes = {"additional_config": {"kv_policy": {"policy": "tova"}}}
    args = engine_args(target, speculative_config=speculative, **changes)
    if layer_type == FULL:
        assert args.create_engine_config().speculative_config.method == kind
    else:
        with pytest.raises(ValueError, match="EAGLE with sliding-window layers"):
            args.create_engine_config()


LATENT = "multi-head latent attention "
SPARSE, BESIDE_STATES = (
    next(row.name for row in REFUSALS if row.name.startswith(LATENT + words))
    for words in ("with sparse attention", "beside layers with a state")
)
# Class of attention layers that models share -> row that refuses it, None for none.
SHARED = {
    "Attention": None,
    "EncoderOnlyAttention": None,  # has no KV cache
    "CrossAttention": "encoder-decoder models",
    "ChunkedLocalAttention": (
        "layers other than full attention, sliding windows and states"
    ),
    "MLAAttention": None,
    "RSWAAttention": "residual sliding-window attention (R-SWA)",
    **dict.fromkeys(("PrefillPrefixLMAttention", "StaticSinkAttention"), OWN),
    # Of layers with a state.
    **dict.fromkeys(("MambaBase", "MambaMixer", "MambaMixer2", "ShortConv")),
    **dict.fromkeys(("LinearAttention", "GatedDeltaNetAttention")),
}
# File or folder of a model that has such a class to itself -> the same.
MODELS_OWN = {
    "extract_hidden_states.py": OTHER_DRAFTS,
    "whisper_causal.py": "images, audio and video",
    **dict.fromkeys(("inkling", "minimax_m3", "qwen4_exp"), OWN),
    **dict.fromkeys(("deepseek_v2.py", "deepseek_v32", "deepseek_v4"), SPARSE),
    **dict.fromkeys(("deepseek_v41", "dots3_note"), SPARSE),
    **dict.fromkeys(("bailing_moe_v3.py", "kimi_k3"), BESIDE_STATES),
}
LAYER_CLASS = re.compile(
    r"^class (\w+)\([^)]*\b(?:Attention|AttentionLayerBase|MambaBase|MLAAttention)\b",
    re.MULTILINE,
)


def test_every_class_of_attention_layers_is_known():
    """A class that a new vLLM brings needs a look at what its models' fields say."""
    vllm = Path(find_spec("vllm").origin).parent
    folders = [vllm / "model_executor/models", vllm / "models"]
    shared = (vllm / "model_executor/layers").rglob("*.py")
    found = {name for path in shared for name in LAYER_CLASS.findall(path.read_text())}
    assert found == set(SHARED)
    own = {
        path.relative_to(folder).parts[0]
        for folder in folders
        for path in folder.rglob("*.py")
        if LAYER_CLASS.search(path.read_text())
    }
    assert own == set(MODELS_OWN)
    rows = {*SHARED.values(), *MODELS_OWN.values()} - {None}
    assert rows <= {row.name for row in REFUSALS}
