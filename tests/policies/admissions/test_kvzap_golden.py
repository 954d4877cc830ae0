"""KVzap against kvpress, whose released package scored and hid the tokens of a model.

The plain decoder of the engine tests is compared with it, and so are the plugin's hook
and decisions, on what that decoder gives its attention.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.engine.kvzap_decoder import KVzapDecoder
from support.golden import Golden
from training.visibility import visible_until
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig
from vllm_kvpolicy.kernels.visibility import NEVER
from vllm_kvpolicy.policies.admissions.kvzap import (
    Surrogate,
    SurrogateScores,
    attach_surrogate,
    surrogate_scores,
)
from vllm_kvpolicy.policies.base import LoadedModel
from vllm_kvpolicy.policies.model_files import ModelShape

GOLDEN = "kvzap"

LAYERS, HEADS, HIDDEN = 2, 2, 64


@pytest.fixture(params=["linear", "mlp"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def surrogate_of(golden: Golden, kind: str) -> Surrogate:
    start = f"{kind}|layers."
    tensors = {
        name.removeprefix(f"{kind}|"): torch.from_numpy(value)
        for name, value in golden.items()
        if name.startswith(start)
    }
    units = len(tensors["layers.0.0.bias"]) if kind == "mlp" else None
    return Surrogate(LAYERS, HIDDEN, HEADS, units, tensors)


@pytest.fixture
def decoder(golden: Golden, kind: str, tiny_model: Path) -> KVzapDecoder:
    """The plain decoder, after it has read the tokens."""
    made = KVzapDecoder(
        tiny_model,
        surrogate_of(golden, kind).tensors,
        hides=True,
        threshold=float(golden["threshold"]),
        recent=int(golden["window"]),
        dense=int(golden["prompt"]),
    )
    made.logits = made.forward(golden["tokens"].tolist()).logits
    return made


def test_the_plain_decoder_is_kvpress(
    golden: Golden, kind: str, decoder: KVzapDecoder
) -> None:
    """Scores of the prompt and of the decoded tokens, and the logits they lead to."""
    scores = torch.from_numpy(golden[f"{kind}|scores"])
    torch.testing.assert_close(torch.stack(decoder.rows), scores, rtol=0, atol=1e-4)
    last = torch.arange(int(golden["prompt"]) - 1, len(golden["tokens"]), 12)
    logits = torch.from_numpy(golden[f"{kind}|logits"])
    torch.testing.assert_close(decoder.logits[last], logits, rtol=0, atol=1e-3)


def test_a_query_sees_the_recent_tokens_and_itself(golden: Golden, kind: str) -> None:
    """`masked_at` is the first query that does not see a token."""
    scores = torch.from_numpy(golden[f"{kind}|scores"])
    kept = scores >= float(golden["threshold"])
    until = visible_until(kept, int(golden["window"]) + 1)
    until = until.clamp_min(int(golden["prompt"]))  # a prompt is read whole
    until[until >= len(golden["tokens"]) + 1] = NEVER
    assert until.tolist() == golden[f"{kind}|masked_at"].tolist()


def test_what_the_hook_notes_decides_alike(
    golden: Golden, kind: str, decoder: KVzapDecoder
) -> None:
    surrogate, threshold = surrogate_of(golden, kind), float(golden["threshold"])
    wanted = torch.from_numpy(golden[f"{kind}|scores"])
    policy = SurrogateScores(surrogate, threshold, exact=False)
    size = len(decoder.inputs[0])
    for layer in range(LAYERS):
        module, scores = nn.Identity(), torch.full((size + 3, HEADS), torch.nan)
        module.forward = lambda positions, hidden_states: hidden_states
        policy._scorers.append(
            attach_surrogate(module, scores, surrogate.linears(layer))
        )
        hidden = decoder.inputs[layer]
        half = size // 2
        for part in (hidden[:half], hidden[half:]):  # by name, and by place
            module(positions=None, hidden_states=part)
            named = scores[: len(part)].clone()
            module(None, part)
            torch.testing.assert_close(scores[: len(part)], named, rtol=0, atol=0)
        module(None, hidden)
        torch.testing.assert_close(scores[:size].T, wanted[layer], rtol=0, atol=1e-4)
        assert scores[size:].isnan().all()
        decided = policy.decisions(layer, hidden, torch.arange(size))
        assert torch.equal(decided.keeps.T, wanted[layer] >= threshold)


class Attention(nn.Module):
    """A module around an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(1, 1)

    def forward(self, positions: Any, hidden_states: Tensor) -> Tensor:
        return hidden_states


def test_layers_take_the_tensors_and_sizes_stay(golden: Golden, kind: str) -> None:
    policy = SurrogateScores(surrogate_of(golden, kind), -4.0, exact=False)
    names = tuple(policy.surrogate.shapes)
    model = nn.ModuleList(Attention() for _ in range(LAYERS))
    given = {"policy": "kvzap", "policy_config": {"kvzap_model": "none"}}
    config: Any = SimpleNamespace(
        additional_config={CONFIG_KEY: KVPolicyConfig.from_dict(given).to_dict()},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    layers, cpu = [module.attn for module in model], torch.device("cpu")
    policy.attach(LoadedModel(model, layers, config, cpu))
    held = sum(
        part.nbytes for each in model for part in each.kv_policy_logits.buffers()
    )
    assert policy.nbytes == held > 0
    assert not policy.surrogate.tensors
    assert tuple(policy.surrogate.shapes) == names
    policy.check_model(ModelShape(LAYERS, 2 * HEADS, HEADS, 32))
    for wrong, key in (((1, 0), "n_modules"), ((0, 1), "output_dim")):
        sizes = LAYERS + wrong[0], 2 * HEADS, HEADS + wrong[1], 32
        with pytest.raises(ValueError, match=key):
            policy.check_model(ModelShape(*sizes))


def test_scores_are_taken_in_the_dtype_of_the_model() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(50, HIDDEN, generator=generator)
    weight, bias = torch.randn(HEADS, HIDDEN, generator=generator), torch.ones(HEADS)
    rounded = [part.bfloat16() for part in (hidden, weight, bias)]
    scores = surrogate_scores(rounded[0], [(rounded[1], rounded[2])])
    assert scores.dtype == torch.float32
    assert torch.equal(scores, scores.bfloat16().float())
    exact = rounded[0].float() @ rounded[1].float().T + 1
    torch.testing.assert_close(scores, exact, rtol=1e-2, atol=1e-1)


def test_other_modules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^Linear: expected .* got input$"):
        attach_surrogate(nn.Linear(2, 2), torch.zeros(1, 1), [])
