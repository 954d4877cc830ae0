"""Learned sinks are read where they are, and refused where nothing asked about them."""

from types import SimpleNamespace

import pytest
import torch

from vllm_kvpolicy.worker.layers import check_known, sink_logits


def layer(sinks: torch.Tensor | None) -> SimpleNamespace:
    return SimpleNamespace(impl=SimpleNamespace(sinks=sinks))


def config(model_type: str) -> SimpleNamespace:
    text = SimpleNamespace(model_type=model_type)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, model="a/model")
    )


def test_a_change_of_the_weights_is_read() -> None:
    layers = [layer(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) for _ in range(2)]
    assert torch.equal(sink_logits(layers), torch.tensor([[1.0, 2.0]] * 2))
    layers[0].impl.sinks.fill_(5)  # in place
    layers[1].impl.sinks = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    got = sink_logits(layers)
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.tensor([[5.0, 5.0], [3.0, 4.0]]))


def test_most_models_have_none() -> None:
    assert sink_logits([layer(None), layer(None)]) is None
    assert sink_logits([SimpleNamespace(impl=SimpleNamespace())]) is None


def test_sinks_of_other_models_are_refused() -> None:
    layers = [layer(torch.zeros(2))]
    check_known(layers, config("gpt_oss"))
    check_known([layer(None)], config("llama"))
    with pytest.raises(ValueError, match="^a/model: .* learned sinks, .* type gpt_oss"):
        check_known(layers, config("llama"))
