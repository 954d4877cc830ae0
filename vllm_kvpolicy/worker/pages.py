"""Views vLLM's KV cache as head pages: one per (superblock, layer, KV head)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.worker.latents import write_latents

SAMPLES = 32, 67  # first and number of bytes that every dtype and scale can show
NUDGE = 1.01  # so that a number is stored as the same byte however it is rounded


@dataclass(frozen=True)
class Float8:
    """Knows which numbers the bytes of an FP8 cache stand for.

    Args:
        stored: torch.float8_e4m3fn or torch.float8_e5m2.
        scales: by "keys" and "values", what a stored number of each layer is
            multiplied by: L numbers above 0.
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

    def numbers(self, name: str, layer: int) -> torch.Tensor:
        """Return [256] model dtype, what each byte of a layer stands for."""
        each = torch.arange(256, device=self.device).to(torch.uint8).view(self.stored)
        return (each.float() * self.scales[name][layer]).to(self.dtype)

    def read(self, name: str, tokens: PagedTokens) -> PagedTokens:
        """Return a copy of tokens as the numbers that they stand for.

        A byte's number is rounded to the model's dtype, as a cache without FP8 rounds.

        Args:
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

        Returns:
            uint8 and model dtype of that shape.
        """
        first, count = SAMPLES
        stored = (first + number % count).to(torch.uint8)
        plain = stored.view(self.stored).float() * NUDGE
        scales = [self.scales[name][layer] for name in ("keys", "values")]
        parts = [part * scale for part, scale in zip(plain, scales, strict=True)]
        return stored, torch.stack(parts).to(self.dtype)


class PagePool:
    """Every head page of one KV cache group.

    Its layers lie in one allocation, one after the other: the page of layer l, block b
    and head h has the id (l * B + b) * H + h, and any (layer, head) may own it.

    Where the heads of a layer share latent vectors (MLA), H is 1, a page holds one
    vector for each token, and what attention adds up is the first part of it.

    Example: B = 10 blocks, H = 2 heads. Head 1 of block 3 in layer 2 is page
    (2 * 10 + 3) * 2 + 1 = 47.

    Args:
        kv_caches: one [B, H, N, 2D] tensor per layer, in model order, block interiors
            head-major (LBHNC).
        keys_are_columns: the CPU kernels' order: a page holds all keys, then all
            values, and keys are stored [D, N].
        float8: what the bytes of an FP8 cache stand for; None where numbers are of the
            model's dtype.
        value_dim: channels of a latent vector that are its value; None for keys and
            values apart.

    Attributes:
        pages: [P, N, 2D], all of them.
        keys, values: for each layer the same [P, N, D] view, of the numbers as they are
            stored; values of latent vectors have fewer channels.
        vectors: [L, B * 2N, H * D], the same memory in rows of one vector per KV head,
            for values other than keys and values. Superblock b is rows b * 2N and
            after. Of an FP8 cache a row has H * D bytes; of latent vectors it is half
            of one.
        null_pages: [1, L, H, 1] int64, ids of each head's stock page of superblock 0.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        keys_are_columns: bool,
        float8: Float8 | None = None,
        value_dim: int | None = None,
    ) -> None:
        first = kv_caches[0]
        self.float8 = float8
        self.dtype = first.dtype if float8 is None else float8.dtype
        stored = first.dtype if float8 is None else float8.stored
        self.num_layers = len(kv_caches)
        self.num_blocks, self.num_heads, self.block_size, width = first.shape
        self.is_latent = value_dim is not None
        self.head_dim = width if self.is_latent else width // 2
        self.pages = _all_pages(kv_caches)
        row = self.num_heads * (width // 2)
        self.vectors = self.pages.view(self.num_layers, -1, row)
        stride = self.num_blocks * self.num_heads
        base = torch.arange(self.num_layers, device=first.device) * stride
        head = torch.arange(self.num_heads, device=first.device)
        self.null_pages = (base[:, None] + head)[None, ..., None]
        if value_dim is None:
            keys, values = _keys_and_values(self.pages, keys_are_columns)
        else:
            keys, values = self.pages, self.pages[..., :value_dim]
        self.keys = [keys.view(stored)] * self.num_layers
        self.values = [values.view(stored)] * self.num_layers
        # What has all of a token in one place: to be moved, as bytes of an FP8 cache.
        self.tokens = (keys, values) if keys_are_columns else (self.pages,)

    def held(self, name: str, pages: torch.Tensor, num_tokens: int) -> PagedTokens:
        """Return the keys or values of rows of pages, as policies read them.

        Of an FP8 cache they are a copy in the model's dtype, and what attention reads:
        the rounded numbers, times the scale of their row's layer.

        Args:
            name: "keys" or "values".
            pages: [E, L, H, C] int64; see `PagedTokens`.
            num_tokens: T, tokens per row.
        """
        pools = self.keys if name == "keys" else self.values
        if self.float8 is None:
            return PagedTokens(pools, pages, num_tokens)
        stored = [pool.view(torch.uint8) for pool in pools]
        return self.float8.read(name, PagedTokens(stored, pages, num_tokens))

    def scale(self, name: str, layer: int) -> float:
        """Return what a layer's stored "keys" or "values" are multiplied by."""
        return 1.0 if self.float8 is None else self.float8.scales[name][layer]

    def scales(self, name: str, layers: torch.Tensor) -> torch.Tensor | float:
        """Return `scale` of layers [M] int64: [M] float32, or 1.0 without FP8."""
        if self.float8 is None:
            return 1.0
        return torch.tensor(self.float8.scales[name], device=layers.device)[layers]

    def own_pages(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return [E, L, H, P] ids of the stock pages of superblocks [E, P] int64."""
        return torch.add(
            self.null_pages, blocks[:, None, None, :], alpha=self.num_heads
        )

    def clear(self, blocks: torch.Tensor) -> None:
        """Set superblocks [M] int64 to zeros in every layer."""
        self.pages.view(self.num_layers, self.num_blocks, -1).index_fill_(1, blocks, 0)


def _all_pages(kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """View all layers as one [L * B * H, N, 2D] tensor."""
    first = kv_caches[0]
    if not all(cache.is_contiguous() for cache in kv_caches):
        raise ValueError("KV caches: expected contiguous head-major blocks (LBHNC)")
    if not _lie_together(kv_caches):
        raise ValueError(
            "KV caches: expected the layers in one allocation, in order, as the vLLM "
            "that this version supports lays them out; leave out --kv-policy"
        )
    num_blocks, num_heads, block_size, width = first.shape
    page = block_size * width
    return first.as_strided(
        (len(kv_caches) * num_blocks * num_heads, block_size, width), (page, width, 1)
    )


def _lie_together(kv_caches: Sequence[torch.Tensor]) -> bool:
    """Return whether every layer starts where the one before it ends."""
    first = kv_caches[0]
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    return all(
        cache.untyped_storage().data_ptr() == memory
        and cache.storage_offset() == start + layer * first.numel()
        for layer, cache in enumerate(kv_caches)
    )


def _keys_and_values(
    pages: torch.Tensor, keys_are_columns: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """View pages [P, N, 2D] as keys and values, both [P, N, D]."""
    block_size, width = pages.shape[1:]
    head_dim = width // 2
    if not keys_are_columns:
        return pages[..., :head_dim], pages[..., head_dim:]
    keys, values = pages.flatten(1).split(block_size * head_dim, dim=-1)
    keys = keys.unflatten(-1, (head_dim, block_size)).transpose(-1, -2)
    return keys, values.unflatten(-1, (block_size, head_dim))


def check_layout(layer: object, pool: PagePool, index: int) -> None:
    """Write one token with the backend's own kernel and read it through our view.

    Writes the last slot of the empty cache and sets it back to zeros.

    Args:
        layer: vLLM's attention layer number `index`.

    Raises:
        RuntimeError: the view does not read what the backend wrote.
    """
    shape = (2, 1, pool.num_heads, pool.head_dim)
    number = torch.arange(shape[2] * shape[3] * 2, device=layer.kv_cache.device)
    if pool.float8 is None:
        expected = sample = (number % 127).to(pool.dtype).view(shape)
    else:
        expected, sample = pool.float8.samples(number.view(shape), index)
    last = pool.num_blocks * pool.block_size - 1
    slot = torch.tensor([last], device=number.device, dtype=torch.int64)
    if pool.is_latent:
        write_latents(layer, sample[0], slot)
    else:
        layer.impl.do_kv_cache_update(layer, *sample, layer.kv_cache, slot)
    block = torch.tensor([[pool.num_blocks - 1]], device=number.device)
    pages = pool.own_pages(block)[0, index, :, 0]
    views = (pool.keys,) if pool.is_latent else (pool.keys, pool.values)
    wrote_here = all(
        torch.equal(view[index][pages, -1].view(layer.kv_cache.dtype), part[0])
        for view, part in zip(views, expected[: len(views)], strict=True)
    )
    layer.kv_cache[-1].zero_()
    if not wrote_here:
        raise RuntimeError(
            f"{type(layer.impl).__name__} stores its KV cache in a layout that this "
            "release does not support; choose another attention backend or block size"
        )
