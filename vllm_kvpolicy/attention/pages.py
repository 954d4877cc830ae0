"""Views of vLLM's KV cache as pages per KV head, whatever the backend's inner order.

Called by attention.compaction. Checks at start-up, with the backend's own write, that
it reads the cache as the backend does.
Process: worker
"""

from collections.abc import Sequence

import torch


def split_pages(
    kv_cache: torch.Tensor, keys_are_columns: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """View one layer's cache as keys and values, both [B, H, N, D].

    Args:
        kv_cache: [B, H, N, 2D] model dtype, vLLM's logical layout, block interiors
            head-major (LBHNC).
        keys_are_columns: the CPU kernels' order: a page holds all keys, then all
            values, and keys are stored [D, N].

    Returns:
        keys and values, views of `kv_cache`.
    """
    num_blocks, num_heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    if not keys_are_columns:
        return kv_cache[..., :head_dim], kv_cache[..., head_dim:]
    flat = kv_cache.view(num_blocks, num_heads, block_size * width)
    keys, values = flat.split(block_size * head_dim, dim=-1)
    keys = keys.unflatten(-1, (head_dim, block_size)).transpose(-1, -2)
    return keys, values.unflatten(-1, (block_size, head_dim))


class HeadPages:
    """Keys and values of all layers of one KV cache group.

    Args:
        kv_caches: one [B, H, N, 2D] tensor per layer, in model order.
        keys_are_columns: see `split_pages`.
    """

    def __init__(
        self, kv_caches: Sequence[torch.Tensor], keys_are_columns: bool
    ) -> None:
        pages = [split_pages(cache, keys_are_columns) for cache in kv_caches]
        self.keys = [keys for keys, _ in pages]
        self.values = [values for _, values in pages]
        self.num_heads, self.block_size, self.head_dim = self.keys[0].shape[1:]

    def gather_keys(self, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Copy the keys of whole superblocks, tokens in the order of the blocks.

        Args:
            blocks: [E, P] int64 superblock ids; any valid id where a row has fewer.
            num_tokens: T, at most P * N.

        Returns:
            [E, L, H, T, D] model dtype.
        """
        layers = [
            keys[blocks].transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]
            for keys in self.keys
        ]
        return torch.stack(layers, dim=1)


def check_layout(layer: object, pages: HeadPages, index: int) -> None:
    """Write one token with the backend's own kernel and read it through our view.

    Uses the last slot of the empty cache and leaves zeros behind.

    Args:
        layer: vLLM's attention layer number `index`.
        pages: the view to check.

    Raises:
        RuntimeError: the view reads something else than the backend wrote.
    """
    keys, values = pages.keys[index], pages.values[index]
    num_blocks, num_heads, block_size, head_dim = keys.shape
    sample = torch.arange(2 * num_heads * head_dim, device=keys.device)
    sample = (sample % 127).to(keys.dtype).view(2, 1, num_heads, head_dim)
    slot = torch.tensor([num_blocks * block_size - 1], device=keys.device)
    layer.impl.do_kv_cache_update(
        layer, sample[0], sample[1], layer.kv_cache, slot.to(torch.int64)
    )
    wrote_here = torch.equal(keys[-1, :, -1], sample[0, 0])
    wrote_here &= torch.equal(values[-1, :, -1], sample[1, 0])
    layer.kv_cache[-1].zero_()
    if not wrote_here:
        raise RuntimeError(
            f"{type(layer.impl).__name__} keeps its KV cache in an order that this "
            "release does not know; choose another attention backend or block size"
        )
