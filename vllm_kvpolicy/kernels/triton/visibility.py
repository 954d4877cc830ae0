"""Twin in Triton of kernels.visibility.write_until: one launch for all its tokens.

No slot has two writers: a new token whose decision comes in the same step is left to
the token that decides.
"""

import torch
import triton
import triton.language as tl

from vllm_kvpolicy.kernels.visibility import NEVER, Decisions

TILE = 128  # of tokens times heads
KEPT = tl.constexpr(NEVER)


def write_until(
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
    """Write until when queries see tokens; nothing for tokens that are nowhere."""
    values = decisions.values
    num_tokens, num_heads = values.shape
    if not values.numel():
        return
    _write_until[(triton.cdiv(values.numel(), TILE),)](
        until,
        values,
        *values.stride(),
        own,
        governed,
        position,
        heads,
        num_tokens,
        num_heads,
        base,
        decisions.scale,
        decisions.most,
        window,
        shift,
        sinks,
        IS_DECIDED=values.dtype == torch.bool,
        TILE=TILE,
    )


@triton.jit(
    do_not_specialize=[
        "value_row",
        "value_head",
        "num_tokens",
        "num_heads",
        "base",
        "window",
        "shift",
        "sinks",
    ]
)
def _write_until(
    until,  # [S] int32
    values,  # [T, H] bool or float32
    value_row: tl.int64,
    value_head: tl.int64,
    own,  # [T or more] int64
    governed,  # likewise
    position,  # likewise
    heads,  # [H] int64
    num_tokens,
    num_heads,
    base: tl.int64,
    scale,
    most,
    window,
    shift,
    sinks,
    IS_DECIDED: tl.constexpr,
    TILE: tl.constexpr,
):
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = entry // num_heads, entry % num_heads
    is_token = token < num_tokens
    start = until + base + tl.load(heads + head)
    source = values + token.to(tl.int64) * value_row + head.to(tl.int64) * value_head
    value = tl.load(source, is_token, other=0)
    keeps = value.to(tl.int32) != 0 if IS_DECIDED else value * scale <= most
    place = tl.load(position + token, is_token, other=0) - shift
    target = tl.load(governed + token, is_token, other=0)
    last = tl.where(keeps | (place < sinks), KEPT, (place + window).to(tl.int32))
    tl.store(start + target, last, target > 0)
    if shift > 0:
        mine = tl.load(own + token, is_token, other=0)
        decides = token + shift
        decided = tl.load(governed + decides, decides < num_tokens, other=0)
        tl.store(start + mine, KEPT, (mine > 0) & (mine != decided))
