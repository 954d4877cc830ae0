"""Events that a test plays: the first two of a request with two heads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_kvpolicy.kernels.assign_pages import PageLists
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch, Destinations, HeldPages

BLOCK = 2
# One layer, two heads that hold 7 tokens: three full pages and one local token.
FIRST = CompactEvent(
    request_id="r0",
    serial=0,
    policy="ams-tova",
    ordinal=0,
    position=7,
    frontier_blocks=3,
    budget=3,
    sinks=1,
    prompt_tokens=6,
    num_global=0,
    source_blocks=(1, 2, 3),
    dest_blocks=(1,),
    local_blocks=(4,),
)
SECOND = replace(
    FIRST,
    serial=1,
    ordinal=1,
    position=11,
    frontier_blocks=5,
    num_global=1,
    source_blocks=(1, 4, 5),
    local_blocks=(6,),
)


def made_batch(
    event: CompactEvent, kept: list[list[int]], rows: Sequence[int] = (3,)
) -> tuple[Batch, Destinations]:
    """Return an event of requests "r0", "r1" ..., and where a page of each head goes.

    Args:
        kept: places that each head keeps among its 7 held tokens.
        rows: of the requests.
    """
    policy: Any = None
    count = len(rows)
    # Pages of two heads: id = superblock * 2 + head.
    blocks = torch.tensor(event.source_blocks + event.local_blocks)
    held = HeldPages(
        pages=(blocks * 2 + torch.arange(2)[:, None]).expand(count, -1, -1),
        num_pages=torch.full((count, 2), len(event.source_blocks)),
        num_local=torch.full((count,), event.local_tokens(BLOCK)),
        max_tokens=7,
    )
    first, pages = torch.tensor([[0, 1, 2]]), torch.tensor([[2, 3]])
    lists = PageLists(first.expand(count, -1), pages.expand(count, -1), None)
    sources = torch.tensor([[head * 7 + t for head in (0, 1) for t in kept[head]]])
    events = [replace(event, request_id=f"r{number}") for number in range(count)]
    batch = Batch(events, policy, rows, {"rows": torch.tensor(rows)}, held)
    return batch, Destinations(lists, sources.expand(count, -1))
