"""The model to train for: the teacher and, in another pass, a student.

A student sees older keys less: a bias is added to its attention logits.

Source: the biases of WG-KV (arXiv 2512.17452) section 3.4 and DMS (arXiv 2506.05345)
section 3. Deviations: an explicit bias on blocks of queries.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from training.visibility import visible, visible_until
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.admissions.wgkv import FLAVOURS

NAME = "kvpolicy_student"  # of the attention function, in transformers
BLOCK = 128  # queries whose attention weights are in memory at once
CHANNELS = 8  # added to a head for the log weight, as fused kernels like them
HIDDEN = -1e4  # log weight of a key that is not seen, as a finite number
# RoPE whose frequencies do not depend on the sequence length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Student(ABC):
    """One forward pass in which queries see less than in the teacher's."""

    @property
    @abstractmethod
    def always(self) -> tuple[int, int]:
        """Newest tokens that every query sees, itself included, and first ones."""

    def enter(self, layer: int, hidden: torch.Tensor) -> None:
        """Receive the residual stream [B, T, d] before a layer's input norm."""
        return None

    @abstractmethod
    def prepare(
        self, layer: int, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a layer's queries, and what is left of each key outside the window.

        Args:
            query: [B, Hq, T, D], after RoPE.
            key: [B, H, T, D], after RoPE.

        Returns:
            The queries, possibly changed, and log weights [B, H, T] float32, see
            `weighed`; None if queries see all keys.
        """

    def mixed(self, layer: int) -> torch.Tensor | None:
        """Return how much a layer's heads use of attention to all keys, [H]; or None.

        The rest is attention as `prepare` says.
        """
        return None

    @abstractmethod
    def keep(self) -> torch.Tensor:
        """Return the keep bits [L, B, H, T] of the pass, as in a server."""


def weighed(
    log_weights: torch.Tensor, window: int, sinks: int, queries: torch.Tensor
) -> torch.Tensor:
    """Return a bias: each key's log weight outside the window, 0 inside and for sinks.

    Args:
        log_weights: [..., T] float32; minus infinity hides a key. May end after the
            last of the queries.
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


def hidden(keep: torch.Tensor) -> torch.Tensor:
    """Return the log weights [..., T] float32 of keys that are kept or not at all."""
    return torch.zeros(keep.shape, device=keep.device).masked_fill(~keep, -torch.inf)


class WeighedAttention(torch.autograd.Function):
    """Causal attention in which keys outside the window have weights; see `weighed`.

    A block of queries attends to each key up to twice: as one of its newest, and as
    one outside its window, whose log weight stands in a channel of its own. Which of
    the two a query sees is a mask without a gradient, so that a CPU's fused kernel
    serves the forward pass; the backward pass computes a block's weights by formula.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_weights: torch.Tensor,
        always: tuple[int, int],
        scaling: float,
    ) -> torch.Tensor:
        """Return [B, Hq, T, D].

        Args:
            query, key, value, scaling: see `attention`; of one dtype.
            log_weights, always: see `Student`.
        """
        (window, sinks), size = always, query.shape[-1]
        weight = log_weights.clamp(min=HIDDEN).to(key.dtype)
        weight[..., :sinks] = 0
        asking, newest, older, values = (
            F.pad(t, (0, CHANNELS)) for t in (query, key, key, value)
        )
        asking[..., size], older[..., size] = 1 / scaling, weight
        parts = []
        for rows in _blocks(query):
            near = slice(max(0, rows.start - window + 1), rows.stop)
            far = slice(max(0, rows.stop - window))
            at = torch.arange(rows.stop, device=key.device)
            first = _places(rows, key)[:, None] - window + 1  # of each query's newest
            seen = (at[near] >= first) & (at[near] <= _places(rows, key)[:, None])
            part = F.scaled_dot_product_attention(
                asking[:, :, rows],
                torch.cat([newest[:, :, near], older[:, :, far]], 2),
                torch.cat([values[:, :, near], values[:, :, far]], 2),
                attn_mask=torch.cat([seen, at[far] < first], 1),
                scale=scaling,
                enable_gqa=True,
            )
            parts.append(part[..., :size])
        out = torch.cat(parts, 2)
        ctx.save_for_backward(query, key, value, log_weights, out)
        ctx.always, ctx.scaling = always, scaling
        return out

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the tensors that `forward` takes."""
        query, key, value, log_weights, out = ctx.saved_tensors
        by_query = torch.empty_like(query)
        by_key, by_value = (
            torch.zeros_like(t, dtype=torch.float32) for t in (key, value)
        )
        by_weight = torch.zeros_like(log_weights)
        shared = (given.float() * out.float()).sum(-1)
        window, sinks = ctx.always
        for rows in _blocks(query):
            seen = slice(rows.stop)
            grouped = _grouped(query[:, :, rows], key)
            logits = _rows(grouped * ctx.scaling) @ key[:, :, seen].mT
            places = _places(rows, key)
            bias = weighed(log_weights[..., seen], window, sinks, places)
            logits = logits.float().view(*grouped.shape[:-1], -1).add_(bias[:, :, None])
            weights = logits.softmax(-1)
            wanted = _rows(_grouped(given[:, :, rows], key))
            by_value[:, :, seen] += _rows(weights.to(value.dtype)).mT @ wanted
            change = (wanted @ value[:, :, seen].mT).float().view_as(weights)
            change.sub_(_grouped(shared[:, :, rows, None], key)).mul_(weights)
            outside = rows.stop - window  # keys that some of these queries weigh
            if outside > sinks:
                some = change[..., sinks:outside].sum(2)
                at = torch.arange(sinks, outside, device=key.device)
                inside = at > places[:, None] - window
                by_weight[..., sinks:outside] += some.masked_fill(inside, 0).sum(-2)
            change = _rows(change.to(query.dtype))
            by_query[:, :, rows] = _per_head(change @ key[:, :, seen], query)
            by_key[:, :, seen] += change.mT @ _rows(grouped)
        scaled = (t.mul_(ctx.scaling).to(key.dtype) for t in (by_query, by_key))
        return *scaled, by_value.to(value.dtype), by_weight, None, None


def _blocks(query: torch.Tensor) -> Iterator[slice]:
    """Yield the blocks of queries."""
    for start in range(0, query.shape[2], BLOCK):
        yield slice(start, min(start + BLOCK, query.shape[2]))


def _grouped(of_queries: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return [B, H, G, Q, ...] of [B, Hq, Q, ...], by the heads of the keys."""
    return of_queries.unflatten(1, (key.shape[1], -1))


def _rows(grouped: torch.Tensor) -> torch.Tensor:
    """Return [B, H, G * Q, ...], so that one product serves a KV head's queries."""
    return grouped.flatten(2, 3)


def _per_head(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return [B, Hq, Q, ...] of [B, H, G * Q, ...]."""
    group = query.shape[1] // rows.shape[1]
    return rows.unflatten(2, (group, -1)).flatten(1, 2)


def _places(rows: slice, key: torch.Tensor) -> torch.Tensor:
    """Return the positions of a block's queries."""
    return torch.arange(rows.start, rows.stop, device=key.device)


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
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves RoPE wide
    out = WeighedAttention.apply(query, key, value, known, student.always, scaling)
    share = student.mixed(module.layer_idx)
    if share is not None:
        whole = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        share = share.repeat_interleave(query.shape[1] // key.shape[1])[:, None, None]
        out = torch.lerp(out, whole, share.to(out.dtype))
    return out.transpose(1, 2), None


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
        kept: folder of the teacher's hidden states, by row; None keeps none.
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
    kept: Path | None = None

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
        if student is None and self.kept is not None:
            return self._recalled(row, self.kept)
        return self._computed(row, student)

    def _computed(self, row: torch.Tensor, student: Student | None) -> torch.Tensor:
        ids = row[None].to(self.device)
        with self._computing():
            out = self.decoder(ids, use_cache=False, student=student)
        return out.last_hidden_state

    @torch.no_grad()
    def _recalled(self, row: torch.Tensor, folder: Path) -> torch.Tensor:
        """Return what a file has of a row, which is written where there is none."""
        norm = self.decoder.norm.weight.tolist()  # other weights have another one
        told = f"{self.model.name_or_path} {self.dtype} {norm} {row.tolist()}"
        file = folder / f"{sha256(told.encode()).hexdigest()}.safetensors"
        if not file.exists():
            # Processes have rows in common.
            fresh = file.with_suffix(f".{uuid4().hex}")
            save_file({"hidden": self._computed(row, None).contiguous()}, fresh)
            fresh.replace(file)
        return load_file(file)["hidden"].to(self.device)

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
    kept: Path | None = None,
) -> Base:
    """Load a model, frozen unless `trained`.

    Args:
        dtype: dtype of computation, and of weights that are not trained.
        trained: the weights will be trained and are float32.
        gradient_checkpointing: a backward pass computes the inside of layers again
            instead of keeping it.
        kept: see `Base`; the folder is made.

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
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
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
        kept=kept,
    )
