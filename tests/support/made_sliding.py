"""A decoder for the oracles, of made models in which not all layers attend fully."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from support.engine.reference_decoder import Activations

PATTERN = (0, 0, 1, 0, 0, 0, 1)  # of `KINDS`: groups of two layers, one of them padded
NUM_FULL, NUM_GROUPS = 2, 3


class MixedDecoder:
    """Transformers' model, whose layers of full attention see what a mask shows.

    It stands in for `ReferenceDecoder` in the oracles: its layers are those of full
    attention with keys and values of their own. Others see their window or keep their
    state, and readers of another layer's keys see what that layer sees.
    """

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        every = [each for each in self.model.modules() if hasattr(each, "scaling")]
        full = [each for each in every if getattr(each, "sliding_window", None) is None]
        latent = any(hasattr(each, "kv_b_proj") for each in full)
        own = [e for e in full if hasattr(e, "kv_b_proj" if latent else "k_proj")]
        # The last one that comes before, for those without keys of their own.
        self.places = {id(each): own.index(each) for each in own}
        for each in full:
            self.places.setdefault(id(each), len(own) - 1)
        self.own, first = own, own[0]
        self.num_layers, self.scale = len(own), float(first.scaling)
        self.num_heads = 1 if latent else first.k_proj.out_features // first.head_dim
        self.num_q_heads = self.model.config.num_attention_heads
        if getattr(first, "sinks", None) is not None:
            self.sinks = torch.stack([each.sinks.detach() for each in own]).numpy()

    @torch.no_grad()
    def forward(self, tokens: list[int], visible: torch.Tensor) -> Activations:
        """Return what a sequence sees; `visible` is [L, H, T, T] bool."""
        seen: dict[int, tuple[torch.Tensor, ...]] = {}
        with self._masked(visible, seen):
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        parts = [seen[layer] for layer in range(self.num_layers)]
        queries, keys, values = map(torch.stack, zip(*parts, strict=True))
        return Activations(logits, queries, keys, values, hidden=torch.empty(0))

    @contextmanager
    def _masked(
        self, visible: torch.Tensor, seen: dict[int, tuple[torch.Tensor, ...]]
    ) -> Iterator[None]:
        """Put masks in place of causal ones; note queries, keys and values."""
        source = sys.modules[type(self.own[0]).__module__]
        attend = source.eager_attention_forward
        groups = self.num_q_heads // self.num_heads
        bias = torch.where(visible, 0.0, -torch.inf).repeat_interleave(groups, 1)

        def forward(
            module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
        ) -> Any:
            place = self.places.get(id(module))
            if place is not None:
                mask = bias[place][None]
            if module in self.own:
                seen[place] = query[0], key[0], value[0]
                if hasattr(module, "kv_b_proj"):
                    seen[place] = as_one_head(module, query[0], key[0])
            return attend(module, query, key, value, mask, **kwargs)

        with patch.object(source, "eager_attention_forward", forward):
            yield


def as_one_head(
    module: Any, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [Hq, T, C] and one key and value [1, T, C] with the same logits.

    The key has the own channels of all heads, one after the other, and those that
    they share; a query is zero at the others' channels.

    Args:
        module: Transformers' attention layer with a latent vector per token.
        query, key: [Hq, T, P + R] with R channels that all heads share.
    """
    own, shared = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    alone = torch.zeros(*own.shape[:2], len(query), own.shape[-1])
    for head in range(len(query)):
        alone[head, :, head] = own[head]
    parts = [*key[..., : own.shape[-1]], key[0, :, own.shape[-1] :]]
    one = torch.cat(parts, -1)[None]
    return torch.cat([alone.flatten(2), shared], -1), one, one
