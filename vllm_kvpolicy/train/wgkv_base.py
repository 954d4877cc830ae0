"""The frozen model that gates are trained for: teacher and, gated, student.

Called by train.wgkv.
Process: any
"""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_kvpolicy.admission.wgkv_gates import FLAVOURS
from vllm_kvpolicy.policies.rope import Rope
from vllm_kvpolicy.train.wgkv_attention import NAME, Gating

# Kinds of RoPE whose frequencies do not change with the length of a sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Base:
    """A model without its output embedding, and its shape.

    Args:
        decoder: the transformers module, frozen.
        flavour: one of `FLAVOURS`.
        num_layers: L.
        num_kv_heads: H.
        head_dim: D.
        rope: how it rotates, on the device of the model.
        rope_theta: base of its rotary embedding.
    """

    decoder: torch.nn.Module
    flavour: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    rope_theta: float

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.rope.inv_freq.device

    def hidden(self, row: torch.Tensor, gating: Gating | None = None) -> torch.Tensor:
        """Run one row and return its hidden states behind the final norm.

        Args:
            row: [T] int64 token ids.
            gating: of the student; None for the teacher.

        Returns:
            [1, T, d] in the dtype of the model.
        """
        ids = row[None].to(self.device)
        out = self.decoder(ids, use_cache=False, gating=gating)
        return out.last_hidden_state


def load_base(model: str, device: str, dtype: torch.dtype) -> Base:
    """Load a model in the dtype given and freeze it.

    Args:
        model: folder or name, as for transformers.
        device: where to put it, as for torch.
        dtype: of its weights.

    Raises:
        ValueError: gates are not known for such a model.
    """
    config = AutoConfig.from_pretrained(model)
    if config.model_type not in FLAVOURS:
        raise ValueError(
            f"model: got type {config.model_type!r}, expected {' or '.join(FLAVOURS)}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"model: got layers of {kinds}, expected full attention only")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"model: got RoPE of type {rope_type!r}, expected one of {ROPE_TYPES}"
        )
    whole = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation=NAME
    )
    decoder = whole.get_decoder().to(device)
    decoder.requires_grad_(False).eval()
    rotary = decoder.rotary_emb
    return Base(
        decoder=decoder,
        flavour=config.model_type,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=decoder.layers[0].self_attn.head_dim,
        rope=Rope(rotary.inv_freq.double(), float(rotary.attention_scaling)),
        rope_theta=float(config.rope_parameters["rope_theta"]),
    )
