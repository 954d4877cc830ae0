"""Keeps superblocks free for an urgent request that waits, until it can enter."""

from collections.abc import Container
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request

from vllm_kvpolicy.block_manager.manager import KVPolicyManager


@dataclass
class Claim:
    """The claim of the first waiting request on superblocks of less urgent ones.

    vLLM preempts for the sake of requests that run, not of those that wait. So what a
    waiting one takes counts as taken in the turns of less urgent requests: these take
    no more, and vLLM preempts the last of them until as much is free.

    Args:
        watermark: superblocks that vLLM wants to be free behind one that enters.
        request: who claims; None for nobody.
        num_blocks: how many have to be free for it to enter.
    """

    manager: KVPolicyManager
    watermark: int = 0
    request: Request | None = None
    num_blocks: int = 0

    def make(self, request: Request, num_shared: int, leaving: frozenset[str]) -> None:
        """Claim what a request takes to enter, if that comes back at all.

        vLLM waives the watermark where nobody else runs.

        Args:
            num_shared: superblocks of its cached prefix that others go on holding.
        """
        manager, known = self.manager, request.num_tokens
        needed = manager.planner.peak_blocks(request.request_id, known, num_shared)
        if needed is None:
            needed = cdiv(known, manager.block_size) - num_shared
        needed += manager.others.sizes.most_blocks(known)
        staying = manager.num_staying(leaving)
        room = manager.num_usable - staying
        wanted = needed + self.watermark
        if not staying:
            wanted = max(needed, min(wanted, room))
        if wanted <= room:
            self.request, self.num_blocks = request, wanted

    def drop(self) -> None:
        self.request, self.num_blocks = None, 0

    def drop_of(self, request_ids: Container[str]) -> None:
        """Claim nothing for requests that have entered or are gone."""
        if self.request is not None and self.request.request_id in request_ids:
            self.drop()

    def take_turn(self, request: Request) -> None:
        """Note whose turn it is, and so what is left free in it."""
        yields = self.request is not None and request.priority > self.request.priority
        self.manager.claimed = self.num_blocks if yields else 0
