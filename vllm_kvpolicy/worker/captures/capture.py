"""The interface of a capture: it records in forward passes what events read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from vllm_kvpolicy.kernels.compact_pages import Moves
from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.transfer import Integers


class Capture:
    """Records something of each forward pass for events; this base does nothing.

    A capture is made before the KV cache exists and bound to it once. In each step it
    learns which tokens are computed (`plan`), sees them in every layer (`observe`) and
    closes the step (`end_step`). At an event of a policy that it serves it is read.

    Attributes:
        holds: what takes its memory, for errors.
        nbytes: bytes of device memory that are held before the KV cache is made.
    """

    holds: ClassVar[str]
    nbytes = 0

    @staticmethod
    def serves(needs: Needs) -> bool:
        """Return whether events with these needs read it; none do here."""
        return False

    def bind(self, pool: PagePool) -> None:
        """Allocate what has one entry per page, once the KV cache exists."""

    def plan(self, step: Step) -> None:
        """Note which tokens the coming forward pass computes."""

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """See one layer's new tokens, from inside its attention.

        Args:
            query: [T, Hq, D] model dtype, post-RoPE.
            key: [T, H, D] model dtype, post-RoPE.
            value: [T, H, D] model dtype.
        """

    def end_step(self) -> None:
        """Collect what the step showed, and see nothing until the next `plan`."""

    def numbers(
        self, events: Sequence[CompactEvent], needs: Needs
    ) -> dict[str, Integers]:
        """Return integers of the host that `read` finds in `Batch.sent`, by name."""
        return {}

    def read(self, batch: Batch) -> Mapping[str, Any]:
        """Return the fields of `EventInputs` that this capture fills for the batch."""
        return {}

    def forget_windows(self, events: Sequence[CompactEvent]) -> None:
        """Forget the query windows of events that have read them."""

    def move(self, moves: Moves) -> None:
        """Move values that are kept by slot along with survivors."""

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that finished, were aborted or were preempted."""

    def warm_up(self) -> None:
        """Run the kernels of a step on dummy tokens, so that they are compiled."""
