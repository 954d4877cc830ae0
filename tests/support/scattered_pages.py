"""Keys on the pages of a cache, in any order, with NaN where there is none."""

from collections.abc import Callable

import torch

from vllm_kvpolicy.kernels.paged import PagedTokens

FAR = 2**31  # elements that an int32 offset does not reach
Make = Callable[[int, torch.dtype], torch.Tensor]
"""Makes zeros that take up addresses alone: the fixture `unbacked` of conftest."""


def scattered(
    tokens: torch.Tensor, lengths: torch.Tensor, page_size: int, columns: bool = False
) -> PagedTokens:
    """Scatter [E, L, H, T, D] over the pages of one cache, values behind the keys."""
    num_tokens, size = tokens.shape[3:]
    is_key = torch.arange(num_tokens) < lengths[..., None]
    per_row = -(-num_tokens // page_size)
    padded = tokens.masked_fill(~is_key[..., None], torch.nan)
    missing = per_row * page_size - num_tokens
    padded = torch.nn.functional.pad(padded, (0, 0, 0, missing), value=torch.nan)
    num_pages = lengths.numel() * per_row + 3
    cache = torch.full((num_pages, page_size, 2 * size), torch.nan).to(tokens.dtype)
    keys = cache[..., :size]
    if columns:
        keys = keys.contiguous().transpose(1, 2).contiguous().transpose(1, 2)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(num_pages, generator=generator)[: lengths.numel() * per_row]
    keys[pages] = padded.view(-1, page_size, size)
    pages = pages.view(*lengths.shape, per_row)
    return PagedTokens([keys] * lengths.shape[1], pages, num_tokens)


def pools_apart(keys: PagedTokens) -> PagedTokens:
    """Copy one event's keys to a pool per layer, each of another size."""
    apart, num_pages = [], keys.pages[:, 0].numel()
    for layer in range(len(keys.pools)):
        pool = keys.pools[0][keys.pages[:, layer].flatten()]
        wide = torch.nn.functional.pad(
            pool, (0, keys.shape[-1], 0, 0, 0, layer), value=torch.nan
        )
        apart.append(wide[..., : keys.shape[-1]])
    pages = torch.arange(num_pages).view_as(keys.pages[:, :1]).expand_as(keys.pages)
    return PagedTokens(apart, pages.contiguous(), keys.num_tokens)


def far_away(keys: PagedTokens, unbacked: Make) -> PagedTokens:
    """Copy keys to pages beyond FAR.

    In the middle of memory, so that an offset that wraps around reads zeros.
    """
    page_size, size = keys.pools[0].shape[1:]
    page = page_size * 2 * size
    first, count = -(-FAR // page), len(keys.pools[0])
    memory = unbacked(2 * FAR + (count + 50) * page, keys.pools[0].dtype)
    pool = memory[FAR:].as_strided(
        (first + count, page_size, size), (page, 2 * size, 1)
    )
    pool[first:] = keys.pools[0]
    return PagedTokens([pool] * len(keys.pools), keys.pages + first, keys.num_tokens)
