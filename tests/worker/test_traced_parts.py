"""What engines must have in common to share compiled code."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from support.made_adapters import make_adapter
from support.worker.loaded_model import loaded_model
from vllm_kvpolicy.kernels.dms_decision import DecisionWeights
from vllm_kvpolicy.policies.admissions.dms.model import DmsRule
from vllm_kvpolicy.policies.admissions.dms.policy import attach_adapter, attach_borrowed
from vllm_kvpolicy.policies.admissions.kvzap import attach_surrogate
from vllm_kvpolicy.policies.hooks import HeadLogits
from vllm_kvpolicy.policies.scorers._signals import TokenSignal
from vllm_kvpolicy.worker.captures.token_signals import TokenSignals, _note_output
from vllm_kvpolicy.worker.worker import traced_parts

LAYERS, HEADS, SIZE, WIDTH = 3, 2, 8, 8
ATTENTION = [SimpleNamespace(attn_backend=SimpleNamespace)]


class Attention(nn.Module):
    """As much of vLLM's attention module as is hooked."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = SIZE
        self.qkv_proj, self.attn = nn.Identity(), nn.Identity()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Do nothing."""
        return hidden_states


class Model(nn.Module):
    """Decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))


def logits(step_tokens: int = 16) -> torch.Tensor:
    return torch.zeros(step_tokens, HEADS)


def hidden(*layers: int, rows: int = 4) -> Any:
    signals = [TokenSignal("hidden", layer, layer) for layer in layers]
    loaded = loaded_model(LAYERS, rows, 8, 16, WIDTH)
    return lambda model: TokenSignals(signals, loaded).attach(model)


def adapter(epsilon: float = 1e-6, step_tokens: int = 16, sign: int = 1) -> Any:
    stacked = make_adapter(LAYERS, HEADS, WIDTH).stacked()
    weights = DecisionWeights(**{k: sign * t for k, t in stacked.items()}).layer(0)
    shape = logits(step_tokens)
    return lambda model: attach_adapter(model.layers[0], shape, weights, epsilon)


def borrowed(channel: int = 0, zero_after_rope: bool = False) -> Any:
    rule = DmsRule(channel=channel, zero_after_rope=zero_after_rope)
    given = rule, logits(), 2 * HEADS, torch.float32
    return lambda model: attach_borrowed(model.layers[0], *given)


def surrogate(depth: int) -> Any:
    linears = [(torch.zeros(HEADS, WIDTH), torch.zeros(HEADS))] * depth
    return lambda model: attach_surrogate(model.layers[0], logits(), linears)


def parts(*attach: Any) -> list[str]:
    model = Model()
    for each in attach:
        each(model)
    return traced_parts(model, ATTENTION)


def test_graphs_that_differ_have_other_parts() -> None:
    graphs = [
        parts(),
        parts(hidden(0)),
        parts(hidden(1)),
        parts(hidden(0, 1)),
        parts(hidden(0, rows=5)),
        parts(adapter()),
        parts(adapter(epsilon=1e-5)),
        parts(adapter(step_tokens=32)),
        parts(borrowed()),
        parts(borrowed(zero_after_rope=True)),
        parts(surrogate(1)),
        parts(surrogate(2)),
        parts(surrogate(1), hidden(0)),
        traced_parts(Model(), [SimpleNamespace(attn_backend=Attention)]),
    ]
    assert len(set(map(tuple, graphs))) == len(graphs)


def test_what_buffers_hold_does_not_matter() -> None:
    assert parts(borrowed(1)) == parts(borrowed(2))
    assert parts(adapter(sign=1)) == parts(adapter(sign=-1))


def test_hooks_of_others_are_not_listed() -> None:
    model = Model()
    model.layers[0].register_forward_hook(lambda *_: None)
    assert traced_parts(model, ATTENTION) == parts()


def closure() -> Any:
    def hook(*_: Any) -> None:
        assert factor

    factor = 2
    hook.__module__ = _note_output.__module__
    return hook


HELD = {
    "closure": closure(),
    "partial": partial(_note_output, 1),
    "method": TokenSignals.attach.__get__(object()),
}


@pytest.mark.parametrize("hook", HELD.values(), ids=HELD)
def test_hooks_that_hold_something_are_refused(hook) -> None:
    model = Model()
    model.layers[0].register_forward_hook(hook)
    with pytest.raises(TypeError, match="expected a plain function"):
        traced_parts(model, ATTENTION)


def test_the_layout_of_tensors_and_the_order_of_backends_matter() -> None:
    def with_buffer(rows: torch.Tensor) -> list[str]:
        model, taken = Model(), HeadLogits(logits=logits())
        taken.register_buffer("rows", rows)
        model.layers[0].add_module("kv_policy_logits", taken)
        return traced_parts(model, ATTENTION)

    assert with_buffer(torch.ones(2, 4)) != with_buffer(torch.ones(4, 2).t())
    one, two = (SimpleNamespace(attn_backend=kind) for kind in (Model, Attention))
    assert traced_parts(Model(), [one, two]) != traced_parts(Model(), [two, one])


def test_tensors_outside_of_buffers_are_refused() -> None:
    model, taken = Model(), HeadLogits(logits=logits())
    taken.scale = torch.ones(1)
    model.layers[0].add_module("kv_policy_logits", taken)
    with pytest.raises(TypeError, match="scale of .*HeadLogits: got Tensor"):
        traced_parts(model, ATTENTION)
