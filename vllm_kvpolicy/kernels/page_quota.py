"""Shares whole pages among KV heads: largest remainder, the total met exactly.

The same number of tokens is added to every head, or taken from every head, until the
pages they fill add up to the total; what a floor or a cap keeps a head from giving or
taking falls to the others. Where the counts fill the total up to rounding, that is the
rule of largest remainders.

Source: this project; remainders as in Hamilton's method of apportionment. Deviations:
a common shift in place of Hamilton's common factor, so that a larger total never takes
a page from any head.
"""

import torch

from vllm_kvpolicy.kernels.dispatch import Operation

MOST_TOKENS = 2**35
BASE = 16  # shifts tried at once


def num_digits(most: int) -> int:
    """Return how many digits to the base of 16 a shift has where no head has more."""
    return -(-(2 * most).bit_length() // 4)


def count_in_pages_ref(
    mask: torch.Tensor, num_pages: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Count the True entries in each row's first pages.

    Args:
        mask: [..., T] bool.
        num_pages: [...] int64.
        block_size: N, entries per page.

    Returns:
        [...] int64.
    """
    entry = torch.arange(mask.shape[-1], device=mask.device)
    return (mask & (entry < (num_pages * block_size)[..., None])).sum(-1)


def page_quota_ref(
    tokens: torch.Tensor,
    floors: torch.Tensor,
    caps: torch.Tensor,
    total: torch.Tensor,
    block_size: int,
    most: int = MOST_TOKENS,
    fills: bool = True,
) -> torch.Tensor:
    """Share `total` pages among the n heads of each group.

    Example: heads ask for 100, 40 and 20 tokens, 6.25, 2.5 and 1.25 pages of 16. The
    whole pages make 9; the tenth goes to the largest remainder, that of the second.

    >>> tokens, floors = torch.tensor([[100, 40, 20]]), torch.tensor([[1, 1, 1]])
    >>> page_quota_ref(tokens, floors, 9 * floors, torch.tensor([10]), block_size=16)
    tensor([[6, 3, 1]])

    Args:
        tokens: [G, n] int64, tokens that each head asks for, at most `most`.
        floors: [G, n] int64 pages, at least 0.
        caps: [G, n] int64 pages, at least `floors`; in tokens at most `most`.
        total: [G] int64 pages.
        block_size: N, tokens per page.
        most: a bound on `tokens`; a lower one takes fewer passes.
        fills: share out all of `total`; otherwise no more than the pages that heads ask
            for, but one at least.

    Returns:
        [G, n] int64 pages between floors and caps. They add up to `total`, or to the
        nearest sum that floors and caps allow. Of equal claims to the last pages the
        lower index wins.
    """

    def pages(shift: torch.Tensor) -> torch.Tensor:
        return ((tokens[:, None] + shift[..., None]) // block_size).clamp(
            floors[:, None], caps[:, None]
        )

    if not fills:
        wanted = -(-tokens // block_size)
        total = torch.minimum(total, wanted.sum(-1).clamp(min=1))
    total = total[:, None]
    # The largest shift that the total covers, digit by digit from one that none fills.
    shift = -tokens.amax(-1, keepdim=True)
    digit = torch.arange(BASE, device=tokens.device)
    for place in reversed(range(num_digits(most))):
        higher = shift + digit * BASE**place  # [G, BASE], from the last on not covered
        covered = pages(higher).sum(-1) <= total
        fits = (covered.sum(-1, keepdim=True) - 1).clamp(min=0)
        shift = shift + fits * BASE**place
    quota, more = pages(shift + digit[:2]).unbind(1)
    claims = more - quota  # 0 or 1: the next page of the next token
    left = total - quota.sum(-1, keepdim=True)
    return quota + claims * (claims.cumsum(-1) <= left)


count_in_pages = Operation(count_in_pages_ref)
page_quota = Operation(page_quota_ref)
