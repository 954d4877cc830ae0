"""What passes between the steps of an event: frozen, one object for a batch of events.

Heads are numbered through the layers: head k of n = L * H is KV head k % H of layer
k // H. All pages below a frontier are full, so a head's list needs no mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_kvpolicy.kernels.assign_pages import PageLists
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs, Policy
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
        rows: rows of the requests in the worker's tables.
        sent: integers of the host, int64 on the device: those that `Compactor`,
            `Tier.numbers` and `Capture.numbers` name, `rows` [E] among them.
        needs: what the policy reads, and positions where an event has hints.
    """

    events: Sequence[CompactEvent]
    policy: Policy
    rows: Sequence[int]
    sent: Mapping[str, torch.Tensor]
    held: HeldPages
    needs: Needs = Needs()


@dataclass(frozen=True)
class Choice:
    """What the policy of a batch saw and what it decided.

    Args:
        inputs: what it saw. Keys and values read the cache, which the move overwrites;
            where survivors take in dropped tokens they are copies made before.
    """

    inputs: EventInputs
    decision: Decision


@dataclass(frozen=True)
class Destinations:
    """Where the survivors of a batch go.

    Args:
        lists: each head's pages after the event.
        sources: [E, M] int64, head * T + token that each place of the lists receives;
            negative after the last survivor.
    """

    lists: PageLists
    sources: torch.Tensor
