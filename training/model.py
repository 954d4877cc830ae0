"""The model to train for: the teacher and, in another pass, a student.

A student sees older keys less: a bias is added to its attention logits.

Source: the biases of WG-KV (arXiv 2512.17452) section 3.4 and DMS (arXiv 2506.05345)
section 3. Deviations: an explicit bias on blocks of queries.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from training.visibility import visible, visible_until
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.admissions.wgkv import FLAVOURS

NAME = "kvpolicy_student"  # of the attention function, in transformers
BLOCK = 512  # queries whose attention weights are in memory at once
# RoPE whose frequencies do not depend on the sequence length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Student(ABC):
    """One forward pass in which queries see less than in the teacher's."""

    def enter(self, layer: int, hidden: torch.Tensor) -> None:
        """Receive the residual stream [B, T, d] before a layer's input norm."""
        return None

    @abstractmethod
    def prepare(
        self, layer: int, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a layer's queries and what `bias` needs to know about its keys.

        Args:
            query: [B, Hq, T, D], after RoPE.
            key: [B, H, T, D], after RoPE.

        Returns:
            The queries, possibly changed, and one number per key, [B, H, T]; None if
            queries see all keys.
        """

    @abstractmethod
    def bias(self, known: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return the bias that is added to the attention logits of some queries.

        Args:
            known: [..., T], from `prepare`; may end after the last of the queries.
            queries: [Q] integers, positions.

        Returns:
            [..., Q, T] float32.
        """

    @abstractmethod
    def keep(self) -> torch.Tensor:
        """Return the keep bits [L, B, H, T] of the pass, as in a server."""


def weighed(
    log_weights: torch.Tensor, window: int, sinks: int, queries: torch.Tensor
) -> torch.Tensor:
    """Return a bias: each key's log weight outside the window, 0 inside and for sinks.

    Args:
        log_weights: [..., T] float32.
        window: tokens that every query sees, itself included.
        sinks: first tokens that every query sees.
        queries: [Q] integers, positions.

    Returns:
        [..., Q, T] float32, minus infinity for keys after their query.
    """
    shape, device = log_weights.shape[-1:], log_weights.device
    none = torch.zeros(shape, dtype=torch.bool, device=device)
    always = visible(visible_until(none, window, sinks=sinks), queries)
    causal = visible(visible_until(~none, window), queries)
    bias = log_weights[..., None, :].masked_fill(always, 0.0)
    return bias.masked_fill(~causal, -torch.inf)


def hidden(
    keep: torch.Tensor, window: int, sinks: int, queries: torch.Tensor
) -> torch.Tensor:
    """Return a bias that hides keys outside the window unless `keep` [..., T]."""
    seen = visible(visible_until(keep, window, sinks=sinks), queries)
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, -torch.inf)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    student: Student | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally over whole, unpadded sequences, with a student's bias if given.

    Args:
        query: [B, Hq, T, D], after RoPE.
        key: [B, H, T, D], after RoPE.
        value: [B, H, T, D].
        attention_mask: None.
        student: the keyword argument of that name of the model's forward.

    Returns:
        [B, T, Hq, D], and None for the weights.
    """
    known = None
    if student is not None:
        query, known = student.prepare(module.layer_idx, query, key)
    if student is None or known is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    num_tokens = query.shape[-2]
    if num_tokens <= BLOCK:
        out = _attend(query, key, value, known, student, scaling, 0)
        return out.transpose(1, 2), None
    parts = []
    for start in range(0, num_tokens, BLOCK):
        stop = min(start + BLOCK, num_tokens)
        seen = (t[:, :, :stop] for t in (key, value, known))
        rows = query[:, :, start:stop]
        # The backward pass recomputes attention weights instead of keeping them.
        parts.append(
            checkpoint(
                _attend, rows, *seen, student, scaling, start, use_reentrant=False
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    known: torch.Tensor,
    student: Student,
    scaling: float,
    start: int,
) -> torch.Tensor:
    """Attend from the queries at positions start, start + 1... to the given keys."""
    positions = torch.arange(start, start + query.shape[-2], device=query.device)
    bias = student.bias(known, positions).to(query.dtype)
    bias = bias.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(NAME, attention)


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
