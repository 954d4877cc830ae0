"""A plain PyTorch Qwen3 decoder with dense keys, values and queries.

Written from the architecture (RMS norm, query and key norms per head, rotary positions,
grouped queries, gated MLP), sharing no code with vLLM or the plugin. A whole sequence
is one forward pass under a visibility mask per (layer, KV head, query), which is the
same as decoding it token by token while the cache loses what the mask hides.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

KV = tuple[torch.Tensor, torch.Tensor]
Cached = Callable[[int, torch.Tensor, torch.Tensor], KV]


@dataclass(frozen=True)
class Activations:
    """What a forward pass saw.

    Args:
        logits: [T, V] float32.
        queries: [L, Hq, T, D] float32, post-RoPE.
        keys: [L, H, T, D] float32, post-RoPE.
        values: [L, H, T, D] float32.
        hidden: [L, T, C] float32, residual stream behind each layer.
    """

    logits: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor


class ReferenceDecoder:
    """Qwen3 in float32.

    Args:
        folder: model folder with config.json and model.safetensors.

    Attributes:
        cached: takes a layer's number, its keys and its values [H, T, D], returns them
            as a cache gives them back; tests may set another.
        rows: what a decoder that decides noted of each layer in a forward pass.
    """

    def __init__(self, folder: Path | str) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        weights = load_file(Path(folder) / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.num_layers = config["num_hidden_layers"]
        self.num_q_heads = config["num_attention_heads"]
        self.num_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.eps = config["rms_norm_eps"]
        self.theta = config["rope_theta"]
        self.scale = self.head_dim**-0.5
        self.cached: Cached = lambda layer, key, value: (key, value)
        self.rows: list[torch.Tensor] = []

    @torch.no_grad()
    def forward(
        self, tokens: list[int], visible: torch.Tensor | None = None
    ) -> Activations:
        """Run a sequence.

        Args:
            tokens: token ids, T of them.
            visible: [L, H, T, T] bool, what the query at each row may see; None is
                causal.
        """
        size, self.rows = len(tokens), []
        if visible is None:
            causal = torch.ones(size, size, dtype=torch.bool).tril()
            visible = causal.expand(self.num_layers, self.num_heads, size, size)
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        queries, keys, values, behind = [], [], [], []
        for layer in range(self.num_layers):
            attended, query, key, value = self._attention(layer, hidden, visible[layer])
            hidden = hidden + attended
            hidden = hidden + self._mlp(layer, hidden)
            queries.append(query)
            keys.append(key)
            values.append(value)
            behind.append(hidden)
        hidden = self._norm(hidden, "model.norm.weight")
        logits = hidden @ self.weights["lm_head.weight"].T
        stacked = map(torch.stack, (queries, keys, values, behind))
        return Activations(logits, *stacked)

    def _attention(
        self, layer: int, hidden: torch.Tensor, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        prefix = f"model.layers.{layer}."
        normed = self._norm(hidden, prefix + "input_layernorm.weight")
        prefix += "self_attn."
        query = self._heads(normed, prefix + "q_proj.weight", prefix + "q_norm.weight")
        key = self._heads(normed, prefix + "k_proj.weight", prefix + "k_norm.weight")
        value = self._heads(normed, prefix + "v_proj.weight", None)
        query, key = self._rotate(query), self._rotate(key)
        key, value = self.cached(layer, key, value)
        group = self.num_q_heads // self.num_heads
        scores = query @ key.repeat_interleave(group, 0).transpose(-1, -2) * self.scale
        mask = visible.repeat_interleave(group, 0)
        probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out = probs @ value.repeat_interleave(group, 0)
        out = out.transpose(0, 1).flatten(1) @ self.weights[prefix + "o_proj.weight"].T
        return out, query, key, value

    def _heads(
        self, hidden: torch.Tensor, weight: str, norm: str | None
    ) -> torch.Tensor:
        """Project to [heads, T, D] and normalise each head."""
        heads = (hidden @ self.weights[weight].T).unflatten(-1, (-1, self.head_dim))
        heads = heads if norm is None else self._norm(heads, norm)
        return heads.transpose(0, 1)

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn the two halves of each vector by its position."""
        half = self.head_dim // 2
        frequency = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(heads.shape[1], dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = heads.split(half, dim=-1)
        return torch.cat(
            [first * cos - second * sin, second * cos + first * sin], dim=-1
        )

    def _mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        prefix = f"model.layers.{layer}."
        hidden = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = hidden @ self.weights[prefix + "mlp.gate_proj.weight"].T
        up = hidden @ self.weights[prefix + "mlp.up_proj.weight"].T
        gated = torch.nn.functional.silu(gate) * up
        return gated @ self.weights[prefix + "mlp.down_proj.weight"].T

    def _norm(self, hidden: torch.Tensor, weight: str) -> torch.Tensor:
        variance = hidden.square().mean(-1, keepdim=True)
        return hidden * torch.rsqrt(variance + self.eps) * self.weights[weight]
