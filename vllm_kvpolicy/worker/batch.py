"""What passes between the steps of an event: frozen, one object for a batch of events.

Heads are numbered through the layers: head k of n = L * H is KV head k % H of layer
k // H. All pages below a frontier are full, so a head's list needs no mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvpolicy.kernels.assign_pages import PageLists
from vllm_kvpolicy.policies.base import Decision, EventInputs, Policy
from vllm_kvpolicy.protocol import CompactEvent


@dataclass(frozen=True)
class HeldPages:
    """The pages that requests hold before an event.

    Args:
        pages: [E, n, P] int64 page ids, oldest token first; any valid id on padding.
        num_pages: [E, n] int64, full pages below the new frontier.
        num_local: [E] int64, tokens at and above it.
        max_tokens: T, no head holds more.
    """

    pages: torch.Tensor
    num_pages: torch.Tensor
    num_local: torch.Tensor
    max_tokens: int


@dataclass(frozen=True)
class Batch:
    """Events that run together: one policy, one budget, as many destinations each.

    Args:
        events: the events.
        policy: decides which tokens survive.
        rows: rows of the requests in the worker's tables.
        index: [E] int64, the same on the device.
        held: what the requests hold.
    """

    events: Sequence[CompactEvent]
    policy: Policy
    rows: Sequence[int]
    index: torch.Tensor
    held: HeldPages


@dataclass(frozen=True)
class Choice:
    """What the policy of a batch saw and what it decided.

    Args:
        inputs: what it saw. Keys and values read the cache, which the move overwrites;
            where survivors take in dropped tokens they are copies made before.
        decision: what it decided.
    """

    inputs: EventInputs
    decision: Decision


@dataclass(frozen=True)
class Placement:
    """Where the survivors of a batch go.

    Args:
        lists: each head's pages after the event.
        sources: [E, M] int64, head * T + token that each place of the lists receives;
            negative after the last survivor.
        is_ordered: the survivors of a head stay in time order.
    """

    lists: PageLists
    sources: torch.Tensor
    is_ordered: bool


def move_slots(
    held: HeldPages, lists: PageLists, sources: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots that survivors leave and those that they go to, both [E, M].

    A slot is page * N + offset. Padding moves slot 0, of vLLM's null block, onto
    itself.

    Example: N = 4, T = 8, two heads. Head 0 holds pages 7 and 3, head 1 holds page 5.
    Head 0 keeps tokens 1, 4, 5 and 7 and gets page 3: its sources are 1, 4, 5, 7. Token
    1 leaves slot 7 * 4 + 1 = 29, token 4 leaves 3 * 4 + 0 = 12; they go to slots 12 and
    13. Head 1 keeps its whole page and gets page 9: its sources 8, 9, 10 and 11 (that
    is 1 * T + token) leave slots 20 to 23 for slots 36 to 39.

    Args:
        held: what is held, pages [E, n, P].
        lists: the pages after the event, [E, M / N].
        sources: [E, M] int64, head * T + token, negative after the last.
        block_size: N.
    """
    head = sources.div(held.max_tokens, rounding_mode="floor").clamp_min(0)
    token = sources.clamp_min(0) % held.max_tokens
    entry = head * held.pages.shape[-1] + token // block_size
    source = held.pages.flatten(1).gather(1, entry) * block_size + token % block_size
    offset = torch.arange(block_size, device=sources.device)
    dest = (lists.pages[..., None] * block_size + offset).flatten(1)
    return torch.where(sources < 0, 0, source), torch.where(sources < 0, 0, dest)
