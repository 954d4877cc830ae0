"""Tells which queries see which keys where tokens may be dropped after a window.

Query i sees key j <= i while i - j < window, and for ever where j is kept. One integer
per key says so: the first query that no longer sees it.

Source: WG-KV (arXiv 2512.17452) section 3.3; with windows that grow within rows of 64,
https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/src/modeling_layers.py.
DMS (arXiv 2506.05345) is the same with `window` one above its own and `settled` shifted
by one. Deviations: none.
"""

from dataclasses import dataclass

import torch

from vllm_kvpolicy.kernels.dispatch import Operation

NEVER = 2**31 - 1  # no position reaches this


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


def extra_visible(
    keep: torch.Tensor, window: int, page: int, queries: torch.Tensor
) -> torch.Tensor:
    """Count the dropped tokens that queries see because whole pages leave the window.

    Args:
        keep: [..., T] bool, of the tokens at positions 0, 1..., sinks included.
        window: see `visible_until`.
        page: see `visible_until`.
        queries: [Q] integers, positions below T.

    Returns:
        [..., Q] int64, at most page - 1: dropped tokens older than the window, in the
            page that the window has not left.
    """
    dropped_before = torch.nn.functional.pad((~keep).long().cumsum(-1), (1, 0))
    window_start = (queries - window + 1).clamp(min=0)
    page_start = window_start // page * page
    return dropped_before[..., window_start] - dropped_before[..., page_start]


@dataclass(frozen=True)
class Decisions:
    """What the tokens of a step decide, per KV head.

    Args:
        values: [T, H], any strides: bool, keep or drop, or float32 logits.
        scale: factor on a logit.
        most: a logit times `scale` above this, or NaN, drops.
    """

    values: torch.Tensor
    scale: float = 1.0
    most: float = 0.0

    @property
    def keeps(self) -> torch.Tensor:
        """[T, H] bool, keep or drop."""
        if self.values.dtype == torch.bool:
            return self.values
        return self.values * self.scale <= self.most

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device


def write_until_ref(
    until: torch.Tensor,
    decisions: Decisions,
    own: torch.Tensor,
    governed: torch.Tensor,
    position: torch.Tensor,
    heads: torch.Tensor,
    base: int,
    window: int,
    shift: int,
    sinks: int,
) -> None:
    """Write until when queries see the tokens that a step computes or decides on.

    The token at t decides on the one at t - shift. A new token counts as kept until it
    is decided on, which may be in the same step, `shift` tokens further on.

    Args:
        until: [S] int32, mutated: the first query position that no longer sees a token,
            `NEVER` where it is kept.
        decisions: of T tokens; those of a request are neighbours, in time order.
        own: [T or more] int64, slot of each token in head 0 of the first layer; 0 for
            nowhere: what the slots of such tokens hold afterwards is unspecified.
        governed: like `own`, of the token that is decided on.
        position: [T or more] int64, of each token in its request.
        heads: [H] int64, contiguous, slots from head 0 to each head.
        base: slots from the first layer to this one.
        window: queries that see a token in any case, its own included.
        shift: 0 or 1.
        sinks: tokens at positions below this are kept whatever is decided.
    """
    keeps = decisions.keeps
    num_tokens = len(keeps)
    if shift:
        until.index_fill_(0, (own[:num_tokens, None] + heads + base).flatten(), NEVER)
    place = position[:num_tokens] - shift
    keeps = keeps | (place < sinks)[:, None]
    last = (place + window).int()[:, None]
    target = governed[:num_tokens, None] + heads + base
    until[target] = torch.where(keeps, NEVER, last)


write_until = Operation(write_until_ref)
