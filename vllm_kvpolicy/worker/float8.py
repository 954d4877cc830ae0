"""What the bytes of an FP8 KV cache stand for: a number of 8 bits times a scale.

vLLM keeps one scale per layer for keys and one for values, from the checkpoint or 1. An
attention kernel divides by it and rounds when it stores a token: to nearest, as GPUs
do, or towards zero, as the CPU kernel of vLLM 0.32 does. So a stored number is off by
up to 1/16 of itself (e4m3) or 1/8 (e5m2), and by twice as much on a CPU.
Whatever reads the cache sees the rounded numbers: attention, and so scorers too.
Source: vLLM's `--kv-cache-dtype`. Deviations: none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels.paged import PagedTokens

SAMPLES = 32, 67  # first and number of bytes that every dtype and scale can show
NUDGE = 1.01  # so that a number is stored as the same byte however it is rounded


@dataclass(frozen=True)
class Float8:
    """The numbers of an FP8 cache.

    Args:
        stored: torch.float8_e4m3fn or torch.float8_e5m2.
        dtype: the model's.
        scales: by "keys" and "values", what a stored number of each layer is
            multiplied by: L numbers above 0.
        device: where the cache is.
    """

    stored: torch.dtype
    dtype: torch.dtype
    scales: Mapping[str, Sequence[float]]
    device: torch.device

    @classmethod
    def of_layers(cls, layers: Sequence[Any]) -> "Float8 | None":
        """Return the numbers of vLLM's attention layers; None without an FP8 cache.

        Args:
            layers: in model order, all with one kind of cache, and scales per layer.
        """
        first = layers[0]
        name = compat.FLOAT8_CACHES.get(first.kv_cache_dtype)
        if name is None:
            return None
        scales = {
            "keys": [layer._k_scale_float for layer in layers],
            "values": [layer._v_scale_float for layer in layers],
        }
        stored = getattr(torch, name)
        return cls(stored, first.dtype, scales, first.kv_cache.device)

    def table(self, name: str) -> torch.Tensor:
        """Return [L] float32, the scales of "keys" or "values"."""
        return torch.tensor(self.scales[name], device=self.device)

    def numbers(self, name: str, layer: int) -> torch.Tensor:
        """Return [256] model dtype, what each byte of a layer stands for."""
        each = torch.arange(256, device=self.device).to(torch.uint8).view(self.stored)
        return (each.float() * self.scales[name][layer]).to(self.dtype)

    def read(self, name: str, tokens: PagedTokens) -> PagedTokens:
        """Return a copy of tokens as the numbers that they stand for.

        A byte's number is rounded to the model's dtype, as a cache without FP8 rounds.

        Args:
            name: "keys" or "values".
            tokens: [E, L, H, T, D] uint8 on pages.
        """
        found = torch.empty(tokens.shape, dtype=self.dtype, device=self.device)
        for layer in range(tokens.shape[1]):
            stored = tokens.dense[:, layer]
            numbers = self.numbers(name, layer)
            found[:, layer] = numbers.index_select(0, stored.flatten().int()).view(
                stored.shape
            )
        return PagedTokens.from_dense(found)

    def samples(
        self, number: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bytes, and keys and values that are stored as these.

        Args:
            number: [2, ...] int64 >= 0, of keys and of values; they choose the bytes.
            layer: whose scales.

        Returns:
            uint8 and model dtype of that shape.
        """
        first, count = SAMPLES
        stored = (first + number % count).to(torch.uint8)
        plain = stored.view(self.stored).float() * NUDGE
        scales = [self.scales[name][layer] for name in ("keys", "values")]
        parts = [part * scale for part, scale in zip(plain, scales, strict=True)]
        return stored, torch.stack(parts).to(self.dtype)
