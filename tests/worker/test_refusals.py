"""What only a loaded model tells is refused with the names of policies and options."""

import pytest
import torch

from vllm_kvpolicy.policies import build as factory
from vllm_kvpolicy.policies.base import Policy
from vllm_kvpolicy.policies.catalogue.names import parse, resolve_options
from vllm_kvpolicy.worker.refused import refused_for
from vllm_kvpolicy.worker.rotary import check_rotates, model_rope

NAMES = ("expected", "ams-tova", "rkv", "ams-expected", "epikv")


def build(name: str, **options: object) -> Policy:
    return factory.build(name, resolve_options(parse(name), options))


def test_a_model_without_rotary_positions() -> None:
    policies = {name: build(name) for name in NAMES}
    refused = refused_for(policies, lambda needs: needs.rope)
    with pytest.raises(ValueError) as caught, refused:
        model_rope(torch.nn.Linear(2, 2), 64)
    text = str(caught.value)
    assert text.startswith("kv_policy: expected, ams-expected cannot run on this model")
    assert "rotary positions: got a model without RoPE" in text
    assert text.endswith("choose other policies, also in `allow`")


def test_a_model_that_may_leave_its_rotation_out() -> None:
    """EXAONE 4 has an embedding in layers of full attention, unused."""
    check_rotates(["Gemma3ForCausalLM"])
    with pytest.raises(ValueError, match="known to use RoPE .*got Exaone4ForCausalLM"):
        check_rotates(["Exaone4ForCausalLM"])


def test_other_policies_are_not_named() -> None:
    policies = {name: build(name) for name in NAMES}
    refused = refused_for(policies, lambda needs: needs.signals)
    match = "kv_policy: epikv cannot run on this model: no layers;"
    with pytest.raises(ValueError, match=match), refused:
        raise ValueError("no layers")


@pytest.mark.parametrize(("option", "key"), [("a_last", "a"), ("b_last", "b")])
def test_layers_that_the_model_does_not_have(option: str, key: str) -> None:
    policy = build("epikv", **{option: 31})
    policy.check_model(32, 8, 2, 64)
    with pytest.raises(ValueError, match=f"^{key}_first, {key}_last: .* last <= 30$"):
        policy.check_model(31, 8, 2, 64)
