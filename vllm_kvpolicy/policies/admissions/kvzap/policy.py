"""KVzap: a surrogate scores each token by what the layer's attention is given.

A token whose score is below a threshold leaves with the recent window.

Source: KVzap (arXiv 2601.07891), with the rule of `presses/kvzap_press.py` and
`presses/dms_press.py` in kvpress 0.5.5; see docs/kvzap.md. Deviations: tokens leave the
window at events, also inside a prompt; heads are filled up to whole pages with refused
tokens; sinks are kept. Theirs hides tokens of a prompt when it has been read whole.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vllm_kvpolicy.config import server_config
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.policies.admissions.kvzap.files import load
from vllm_kvpolicy.policies.admissions.kvzap.surrogate import (
    Surrogate,
    surrogate_scores,
)
from vllm_kvpolicy.policies.admitted import BaseAdmission
from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.policies.head_logits import HeadLogits
from vllm_kvpolicy.policies.model_parts import attention_modules
from vllm_kvpolicy.policies.ranks import HeadShard

ARGUMENT = "hidden_states"  # of the forward method of vLLM's attention modules


def from_options(
    kvzap_model: str, kvzap_threshold: float, exact: bool
) -> "SurrogateScores":
    """Build the admission from the folder of a surrogate.

    Raises:
        ValueError: files are missing, broken, or hold something else.
    """
    return SurrogateScores(load(kvzap_model), kvzap_threshold, exact)


class SurrogateScores(BaseAdmission):
    """Admits the tokens whose score is not below a threshold; a `Decider`.

    Args:
        surrogate: as read from a folder; once layers have its tensors, its sizes alone.
        lowest: score that a token needs to stay.
        exact: tokens are hidden as soon as they leave the window.
    """

    shift = 0

    def __init__(self, surrogate: Surrogate, lowest: float, exact: bool) -> None:
        self.needs = Needs(until=True, exact=exact)
        self.surrogate, self.lowest = surrogate, lowest
        self.window = 1
        self._scorers: list[HeadLogits] = []

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check that the surrogate fits the model; see `Surrogate.check_heads`."""
        self.surrogate.check_heads(num_layers, num_kv_heads)

    def take_heads(self, shard: HeadShard) -> None:
        """Score for the rank's KV heads; see `BaseAdmission`."""
        self.surrogate = self.surrogate.of_heads(shard)

    @property
    def nbytes(self) -> int:
        """Bytes of scores and surrogates."""
        return sum(part.nbytes for each in self._scorers for part in each.buffers())

    def attach(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        vllm_config: Any,
        rope: Rope | None,
    ) -> None:
        """Hook the attention module of each layer; see `Decider`."""
        config = server_config(vllm_config)
        assert config is not None  # a worker without a policy builds none
        # Besides itself, a query sees as many tokens as are recent at an event.
        self.window = config.recent_tokens + 1
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        shape = step_tokens, self.surrogate.num_kv_heads
        device = next(model.parameters()).device
        dtype = vllm_config.model_config.dtype
        for index, attention in enumerate(attention_modules(model, layers)):
            linears = [
                (weight.to(device, dtype), bias.to(device, dtype))
                for weight, bias in self.surrogate.linears(index)
            ]
            scores = torch.zeros(shape, device=device)
            self._scorers.append(attach_surrogate(attention, scores, linears))
        self.surrogate = replace(self.surrogate, tensors={})

    def decisions(
        self, layer: int, key: torch.Tensor, positions: torch.Tensor
    ) -> Decisions:
        """Return [T, H] decisions of the tokens themselves; see `Decider`."""
        is_below = self._scorers[layer].logits[: len(positions)] < self.lowest
        return Decisions(~is_below)


def attach_surrogate(
    attention: nn.Module,
    scores: torch.Tensor,
    linears: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> HeadLogits:
    """Score what an attention module is given.

    Args:
        attention: vLLM's attention module of a decoder layer, called with hidden
            states [T, d] behind the input norm.
        scores: [step_tokens, H] float32, written.
        linears: see `surrogate_scores`.

    Returns:
        What holds the scores.

    Raises:
        ValueError: its forward method takes no hidden states.
    """
    arguments = list(inspect.signature(attention.forward).parameters)
    if ARGUMENT not in arguments:
        raise ValueError(
            f"{type(attention).__name__}: expected a forward method that takes "
            f"{ARGUMENT}, as in vLLM's Llama and Qwen3, got {', '.join(arguments)}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for number, (weight, bias) in enumerate(linears):
        tensors |= {f"weight_{number}": weight, f"bias_{number}": bias}
    taken = HeadLogits(scores, **tensors)
    taken.depth, taken.place = len(linears), arguments.index(ARGUMENT)
    attention.add_module("kv_policy_logits", taken)
    attention.register_forward_pre_hook(_score, with_kwargs=True)
    return taken


def _score(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Store the scores of [T, d]; a pre-hook."""
    taken = attention.kv_policy_logits
    hidden = kwargs[ARGUMENT] if ARGUMENT in kwargs else args[taken.place]
    linears = [
        (getattr(taken, f"weight_{number}"), getattr(taken, f"bias_{number}"))
        for number in range(taken.depth)
    ]
    taken(surrogate_scores(hidden, linears))
