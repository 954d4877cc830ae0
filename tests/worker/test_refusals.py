"""What only a loaded model tells is refused with the names of policies and options."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.calibration_files import options_for
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.base import Policy
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.worker.setup import WorkerSetup, refused_for, rope_for

NAMES = ("expected", "ams-tova", "rkv", "ams-expected", "epikv")


def build(name: str, **options: object) -> Policy:
    return factory.build(name, options)


def test_pairs_that_a_policy_cannot_read(tmp_path: Path) -> None:
    """Only the policies are named that read pairs half a head apart."""
    sizes = 1, 2, 2, 64
    options = options_for("triattention", tmp_path, *sizes)
    policies = {name: build(name) for name in NAMES}
    layer, model = torch.nn.Module(), torch.nn.Module()
    layer.head_size, model.attn, model.rotary_emb = 64, layer, torch.nn.Module()
    table = torch.cat([torch.ones(9, 32), torch.zeros(9, 32)], -1)
    model.rotary_emb.register_buffer("cos_sin_cache", table)
    vars(model.rotary_emb).update(is_neox_style=False, head_size=64)
    rope = rope_for(policies, model, [layer])
    assert rope is not None and rope.order is not None
    policies["triattention"] = build("triattention", **options)
    match = "^kv_policy: triattention cannot run .* got a model with other pairs"
    with pytest.raises(ValueError, match=match):
        rope_for(policies, model, [layer])
    assert rope_for({"rkv": policies["rkv"]}, model, [layer]) is None


def test_an_attention_backend_that_splits_superblocks() -> None:
    """The scheduler's tables would name other tokens than the kernels read."""
    layer = SimpleNamespace(kv_cache=torch.zeros(3, 2, 16, 8), kv_cache_dtype="auto")
    setup: Any = SimpleNamespace(
        layers=[layer], requests=SimpleNamespace(block_size=32)
    )
    with pytest.raises(RuntimeError, match="got pages of 16 tokens, expected 32"):
        WorkerSetup.bind(setup, keys_are_columns=False)


def test_other_policies_are_not_named() -> None:
    policies = {name: build(name) for name in NAMES}
    refused = refused_for(policies, lambda needs: needs.signals)
    match = "kv_policy: epikv cannot run on this model: no layers;"
    with pytest.raises(ValueError, match=match), refused:
        raise ValueError("no layers")


@pytest.mark.parametrize(("option", "key"), [("a_last", "a"), ("b_last", "b")])
def test_layers_that_the_model_does_not_have(option: str, key: str) -> None:
    policy = build("epikv", **{option: 31})
    policy.check_model(ModelShape(32, 8, 2, 64))
    with pytest.raises(ValueError, match=f"^{key}_first, {key}_last: .* last <= 30$"):
        policy.check_model(ModelShape(31, 8, 2, 64))
