"""What the worker remembers of each request's survivors from event to event.

The values that policies ask to keep per token, and true positions.
Called by attention.compaction.
Process: worker
"""

import torch

from vllm_kvpolicy.attention.layouts import Held


class SurvivorMemory:
    """One float32 per (slot, layer, KV head, token right after an event).

    Values of the global pool lie in the order of the slot's page lists; those of local
    tokens lie apart, per head.

    Args:
        num_slots: requests that may be live at once.
        num_heads: n = L * H.
        max_global_tokens: survivors of one request in the global pool, all heads.
        max_local_tokens: most local tokens right after an event, per head.
        device: where the memory lives.
    """

    def __init__(
        self,
        num_slots: int,
        num_heads: int,
        max_global_tokens: int,
        max_local_tokens: int,
        device: torch.device,
    ) -> None:
        self.survivors = torch.zeros(num_slots, max_global_tokens, device=device)
        self.local = torch.zeros(num_slots, num_heads, max_local_tokens, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.survivors.nbytes + self.local.nbytes

    def read(
        self, slots: torch.Tensor, first: torch.Tensor, max_tokens: int
    ) -> torch.Tensor:
        """Return [E, n, T] values, zero for tokens since the last event.

        Args:
            slots: [E] int64.
            first: [E, n + 1] int64, first survivor of each head before this event.
            max_tokens: T.
        """
        token = torch.arange(max_tokens, device=slots.device)
        count = first.diff(dim=-1)[..., None]
        entry = (first[:, :-1, None] + token).clamp_max(self.survivors.shape[-1] - 1)
        survivors = self.survivors[slots].gather(1, entry.flatten(1)).view(entry.shape)
        entry = token - count
        local = self.local[slots]
        known = (entry >= 0) & (entry < local.shape[-1])
        local = local.gather(-1, entry.clamp(0, local.shape[-1] - 1))
        return torch.where(entry < 0, survivors, torch.where(known, local, 0.0))

    def write(
        self,
        slots: torch.Tensor,
        values: torch.Tensor,
        sources: torch.Tensor,
        held: Held,
        block_size: int,
    ) -> None:
        """Replace what is known of the slots' survivors.

        Args:
            slots: [E] int64.
            values: [E, n, T] float32, before survivors are gathered.
            sources: [E, M] int64, head * T + token of each survivor in the order of
                the new page lists; negative behind the last.
            held: what the requests held.
            block_size: N, tokens per page.
        """
        kept = values.flatten(1).gather(1, sources.clamp_min(0))
        self.survivors[slots, : sources.shape[-1]] = torch.where(sources < 0, 0.0, kept)
        token = torch.arange(self.local.shape[-1], device=slots.device)
        index = held.num_pages[..., None] * block_size + token
        local = values.gather(-1, index.clamp_max(values.shape[-1] - 1))
        is_local = token < held.num_local[:, None, None]
        self.local[slots] = torch.where(is_local, local, 0.0)

    def clear(self, slots: torch.Tensor) -> None:
        """Zero the memory of slots that a new request takes over."""
        self.survivors[slots] = 0
        self.local[slots] = 0
