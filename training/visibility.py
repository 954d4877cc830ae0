"""Says in closed form which queries see which keys; see `kernels.visibility`.

Source: WG-KV (arXiv 2512.17452) section 3.3; with windows that grow within rows of 64,
https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/src/modeling_layers.py.
Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.visibility import NEVER


def settled(decisions: torch.Tensor, shift: int) -> torch.Tensor:
    """Turn decisions, in the order of the tokens that make them, into keep bits.

    Args:
        decisions: [..., T] bool, keep or drop.
        shift: the token at t decides on the one at t - shift: 0 in WG-KV, 1 in DMS.

    Returns:
        [..., T] bool, keep bits. The last `shift` tokens have no decision yet and
        count as kept; they are still in every window longer than `shift`.
    """
    undecided = torch.ones_like(decisions[..., :shift])
    return torch.cat([decisions[..., shift:], undecided], -1)


def visible_until(
    keep: torch.Tensor,
    window: int,
    *,
    first: int = 0,
    sinks: int = 0,
    page: int = 1,
    dilation: int = 1,
) -> torch.Tensor:
    """Return the position of the first query that no longer sees each key.

    Args:
        keep: [..., T] bool, of the tokens at positions first, first + 1...
        window: keys that every query sees, itself included, at least 1.
        first: position of the first token.
        sinks: tokens at positions below this are kept whatever `keep` says.
        page: tokens that leave the window at once, when the last of them does; pages
            begin at multiples of this. Queries see up to page - 1 dropped tokens more.
        dilation: queries of one row block, which begin at multiples of this, see what
            the first of them does, and themselves. The authors' prefill has 64.

    Returns:
        [..., T] int32, `NEVER` where a key is kept.
    """
    positions = torch.arange(first, first + keep.shape[-1], device=keep.device)
    last_of_page = _up(positions + 1, page) - 1
    until = _up(last_of_page + window, dilation)
    kept = keep | (positions < sinks)
    return torch.where(kept, NEVER, until).int()


def _up(positions: torch.Tensor, multiple: int) -> torch.Tensor:
    """Round up to a multiple."""
    return -(-positions // multiple) * multiple


def visible(
    until: torch.Tensor, queries: torch.Tensor, *, first: int = 0
) -> torch.Tensor:
    """Return which queries see which keys.

    Args:
        until: [..., T] int32, see `visible_until`.
        queries: [Q] integers, their positions.
        first: position of the first key.

    Returns:
        [..., Q, T] bool.
    """
    keys = torch.arange(first, first + until.shape[-1], device=until.device)
    rows = queries[:, None]
    return (keys <= rows) & (rows < until[..., None, :])
