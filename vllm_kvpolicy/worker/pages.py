"""Views vLLM's KV cache as head pages: one per (superblock, layer, KV head)."""

from collections.abc import Sequence

import torch


class PagePool:
    """Every head page of one KV cache group.

    Where all layers lie in one allocation at equal distances, as in vLLM 0.32, the page
    of layer l, block b and head h has the id (l * B + b) * H + h, and any (layer, head)
    may own it. Otherwise ids are b * H + h and valid within their layer, so that pages
    can change heads but not layers.

    Example: B = 10 blocks, H = 2 heads. In one allocation, head 1 of block 3 in layer 2
    is page (2 * 10 + 3) * 2 + 1 = 47; in allocations per layer it is page 7 of layer 2.

    Args:
        kv_caches: one [B, H, N, 2D] tensor per layer, in model order, block interiors
            head-major (LBHNC).
        keys_are_columns: the CPU kernels' order: a page holds all keys, then all
            values, and keys are stored [D, N].

    Attributes:
        spans_layers: whether pages may change layers.
        num_groups: 1 if they may, else the number of layers.
        null_pages: [1, L, H, 1] int64, ids of each head's stock page of superblock 0.
    """

    def __init__(
        self, kv_caches: Sequence[torch.Tensor], keys_are_columns: bool
    ) -> None:
        first = kv_caches[0]
        self._caches = kv_caches
        self.num_layers = len(kv_caches)
        self.num_blocks, self.num_heads, self.block_size, width = first.shape
        self.head_dim = width // 2
        shared = _one_allocation(kv_caches)
        self.spans_layers = shared is not None
        self.num_groups = 1 if self.spans_layers else self.num_layers
        if shared is None:
            self._pools = [cache.flatten(0, 1) for cache in kv_caches]
            stride = 0
        else:
            self._pools = [shared] * self.num_layers
            stride = self.num_blocks * self.num_heads
        base = torch.arange(self.num_layers, device=first.device) * stride
        head = torch.arange(self.num_heads, device=first.device)
        self.null_pages = (base[:, None] + head)[None, ..., None]
        views = [_keys_and_values(pool, keys_are_columns) for pool in self._pools]
        self.keys = [keys for keys, _ in views]
        self.values = [values for _, values in views]
        self._keys_are_columns = keys_are_columns

    def pages_of(self, layer: int) -> torch.Tensor:
        """Return [P, 1, N, 2D]: the pages to which page ids of this layer refer."""
        return self._pools[layer].unsqueeze(1)

    def tokens_of(self, group: int) -> Sequence[torch.Tensor]:
        """Return [P, N, ...] views that have all of a token in one place each.

        Args:
            group: 0 to `num_groups` - 1.
        """
        if self._keys_are_columns:
            return self.keys[group], self.values[group]
        return (self._pools[group],)

    def own_pages(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return [E, L, H, P] ids of the stock pages of superblocks [E, P] int64."""
        return torch.add(
            self.null_pages, blocks[:, None, None, :], alpha=self.num_heads
        )

    def vectors_of(self, layer: int) -> torch.Tensor:
        """Return [B * 2N, H * D]: a layer's memory in rows of one vector per KV head.

        Superblock b is rows b * 2N and after. For values other than keys and values.
        """
        return self._caches[layer].view(-1, self.num_heads * self.head_dim)

    def read_vectors(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [L, M, H * D] of rows [M] int64 of `vectors_of`, in every layer."""
        if not self.spans_layers:
            caches = map(self.vectors_of, range(self.num_layers))
            return torch.stack([cache.index_select(0, rows) for cache in caches])
        shape = (self.num_layers, -1, self.num_heads * self.head_dim)
        return self._pools[0].view(shape).index_select(1, rows)


def _one_allocation(kv_caches: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """View all layers as one [L * B * H, N, 2D] tensor; None if they lie apart."""
    first = kv_caches[0]
    if not all(cache.is_contiguous() for cache in kv_caches):
        raise ValueError("KV caches: expected contiguous head-major blocks (LBHNC)")
    for layer, cache in enumerate(kv_caches):
        here = cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        offset = first.storage_offset() + layer * first.numel()
        if not here or cache.storage_offset() != offset:
            return None
    num_blocks, num_heads, block_size, width = first.shape
    page = block_size * width
    return first.as_strided(
        (len(kv_caches) * num_blocks * num_heads, block_size, width), (page, width, 1)
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
        pool: the view to check.

    Raises:
        RuntimeError: the view does not read what the backend wrote.
    """
    keys, values = pool.keys[index], pool.values[index]
    shape = (2, 1, pool.num_heads, pool.head_dim)
    sample = torch.arange(2 * pool.num_heads * pool.head_dim, device=keys.device)
    sample = (sample % 127).to(keys.dtype).view(shape)
    last = pool.num_blocks * pool.block_size - 1
    slot = torch.tensor([last], device=keys.device, dtype=torch.int64)
    layer.impl.do_kv_cache_update(layer, sample[0], sample[1], layer.kv_cache, slot)
    block = torch.tensor([[pool.num_blocks - 1]], device=keys.device)
    pages = pool.own_pages(block)[0, index, :, 0]
    wrote_here = torch.equal(keys[pages, -1], sample[0, 0])
    wrote_here &= torch.equal(values[pages, -1], sample[1, 0])
    layer.kv_cache[-1].zero_()
    if not wrote_here:
        raise RuntimeError(
            f"{type(layer.impl).__name__} stores its KV cache in a layout that this "
            "release does not support; choose another attention backend or block size"
        )
