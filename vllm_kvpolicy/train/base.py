"""Loads the model to train for: the teacher and, in another pass, the student."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.admissions.wgkv import FLAVOURS
from vllm_kvpolicy.train.attention import NAME, Student

# RoPE whose frequencies do not depend on the sequence length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Base:
    """A loaded model and its shape.

    Args:
        model: the transformers module with its output embedding.
        flavour: one of `FLAVOURS`.
        num_layers: L.
        num_kv_heads: H.
        head_dim: D.
        hidden_size: d.
        rope: its rotary embedding, on the device of the model.
        rope_theta: base of its rotary embedding.
        epsilon: its norms add this to mean squares.
        ends: token ids that end a text.
        dtype: dtype of computation.
    """

    model: Any
    flavour: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    rope: Rope
    rope_theta: float
    epsilon: float
    ends: tuple[int, ...]
    dtype: torch.dtype

    @property
    def decoder(self) -> Any:
        """The module without its output embedding."""
        return self.model.get_decoder()

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.rope.inv_freq.device

    def hidden(self, row: torch.Tensor, student: Student | None = None) -> torch.Tensor:
        """Run one row and return its hidden states after the final norm.

        Args:
            row: [T] int64 token ids.
            student: limits what queries see; None for the teacher.

        Returns:
            [1, T, d] floating point.
        """
        ids = row[None].to(self.device)
        with self._computing():
            out = self.decoder(ids, use_cache=False, student=student)
        return out.last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] float32 of hidden states [..., d]."""
        with self._computing():
            return self.model.get_output_embeddings()(hidden).float()

    def _computing(self) -> torch.autocast:
        """Return a context that computes in `dtype`, whatever the weights' dtype."""
        mixed = self.dtype != self.model.dtype
        return torch.autocast(self.device.type, self.dtype, enabled=mixed)


def _tell_student(module: Any, given: tuple, named: dict[str, Any]) -> None:
    """Pass a layer's input to the student, if this pass has one."""
    student = named.get("student")
    if student is not None:
        hidden = given[0] if given else named["hidden_states"]
        student.enter(module.self_attn.layer_idx, hidden)


def load_base(
    model: str,
    device: str | torch.device,
    dtype: torch.dtype,
    trained: bool = False,
    gradient_checkpointing: bool = False,
) -> Base:
    """Load a model, frozen unless `trained`.

    Args:
        model: folder or name, as for transformers.
        device: as for torch.
        dtype: dtype of computation, and of weights that are not trained.
        trained: the weights will be trained and are float32.
        gradient_checkpointing: a backward pass computes the inside of layers again
            instead of keeping it.

    Raises:
        ValueError: a kind of model that cannot have a student here.
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
        model, dtype=torch.float32 if trained else dtype, attn_implementation=NAME
    )
    whole = whole.to(device).requires_grad_(trained).eval()
    if gradient_checkpointing:
        whole.gradient_checkpointing_enable({"use_reentrant": False})
        whole.train()  # transformers asks for it; nothing in these models is dropped
    decoder = whole.get_decoder()
    for layer in decoder.layers:
        layer.register_forward_pre_hook(_tell_student, with_kwargs=True)
    rotary = decoder.rotary_emb
    ends = config.eos_token_id
    return Base(
        model=whole,
        flavour=config.model_type,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=decoder.layers[0].self_attn.head_dim,
        hidden_size=config.hidden_size,
        rope=Rope(rotary.inv_freq.double(), float(rotary.attention_scaling)),
        rope_theta=float(config.rope_parameters["rope_theta"]),
        epsilon=float(config.rms_norm_eps),
        ends=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        dtype=dtype,
    )
