"""Keys on the pages of a cache, in any order, with NaN where there is none."""

from collections.abc import Callable

import torch

from vllm_kvpolicy.kernels.paged import PagedTokens

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
