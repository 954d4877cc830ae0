"""DMS: a model trained for it decides itself which tokens leave its cache.

A token is dropped once it is more than `window` tokens old if the logit of its
successor is above 0: scale * x - offset, x a channel of the model's queries or the
output of an adapter.

Source: Dynamic Memory Sparsification, arXiv 2506.05345, section 3; see
`model` and docs/dms.md. Deviations: tokens leave the window at events;
heads are filled up to whole pages with refused tokens; sinks are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vllm_kvpolicy.kernels.dms_decision import DecisionWeights
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.policies.admissions.dms.adapter import DmsAdapter
from vllm_kvpolicy.policies.admissions.dms.files import load
from vllm_kvpolicy.policies.admissions.dms.hooks import attach_adapter, attach_borrowed
from vllm_kvpolicy.policies.admissions.dms.model import DmsRule, model_folder, rule_for
from vllm_kvpolicy.policies.admitted import BaseAdmission
from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.policies.model_parts import attention_modules, decoder_layers
from vllm_kvpolicy.policies.ranks import HeadShard


def from_options(**options: Any) -> "DelayedEviction":
    """Build the admission, with an adapter where the options name one.

    Args:
        **options: those of `catalogue.admissions.DMSOptions`.

    Raises:
        ValueError: the adapter's file is missing, broken, or something else.
    """
    path = options["dms_adapter"]
    return DelayedEviction(None if path is None else load(path), options)


class DelayedEviction(BaseAdmission):
    """Reads the decisions of a model that was trained with DMS.

    Args:
        adapter: decides before each layer; None for what the model itself has.
        options: resolved options of the policy.
    """

    def __init__(self, adapter: DmsAdapter | None, options: Mapping[str, Any]) -> None:
        self.adapter, self.options = adapter, options
        self.needs = Needs(until=True, exact=options["exact"])
        self.rule = DmsRule()
        self.weights: DecisionWeights | None = None
        self._logits: list[torch.Tensor] = []
        self._shard: HeadShard | None = None

    def take_heads(self, shard: HeadShard) -> None:
        """Decide for the rank's KV heads; see `BaseAdmission`."""
        self._shard = shard

    @property
    def window(self) -> int:
        """Queries that always see a token, its own included."""
        return self.rule.window + 1

    @property
    def shift(self) -> int:
        """Distance from a token to the older one that it decides on, 0 or 1."""
        return self.rule.shift

    @property
    def nbytes(self) -> int:
        """Bytes of logits and of the adapter."""
        weights = self.weights
        adapter = (weights.norm, weights.projection) if weights is not None else ()
        return sum(tensor.nbytes for tensor in (*self._logits, *adapter))

    def attach(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        vllm_config: Any,
        rope: Rope | None,
    ) -> None:
        """Hook a model's layers; see `Decider`."""
        config, first = vllm_config.model_config, layers[0]
        self.rule = rule_for(config, self.adapter, self.options)
        step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        shape = step_tokens, first.num_kv_heads
        device = next(model.parameters()).device
        # Copies, not views: compiled graphs must not be given parts of one buffer.
        self._logits = [torch.zeros(shape, device=device) for _ in layers]
        if self.rule.is_borrowed:
            parents = attention_modules(model, layers)
            for parent, logits in zip(parents, self._logits, strict=True):
                attach_borrowed(
                    parent, self.rule, logits, first.num_heads, config.dtype
                )
            return
        adapter = load(model_folder(config)) if self.adapter is None else self.adapter
        weights = adapter.stacked()
        if self._shard is not None:
            weights["projection"] = self._shard.kv_heads(weights["projection"], 1)
        self.weights = DecisionWeights(
            **{k: t.to(device, config.dtype) for k, t in weights.items()}
        )
        epsilon = config.hf_text_config.rms_norm_eps
        found = decoder_layers(model, len(layers))
        for index, layer in enumerate(found):
            own = self.weights.layer(index)
            attach_adapter(layer, self._logits[index], own, epsilon)

    def decisions(
        self, layer: int, key: torch.Tensor, positions: torch.Tensor
    ) -> Decisions:
        """Return [T, H] decisions on the tokens before; see `Decider`."""
        logits = self._logits[layer][: len(positions)]
        if self.rule.per_layer:
            logits = logits[:, :1].expand_as(logits)
        return Decisions(logits, self.rule.scale, self.rule.offset)
