"""What the worker remembers of each request's survivors from event to event.

EMA credit for the policies that keep one; true positions only while tracing.
Called by attention.compaction.
Process: worker
"""

import torch


class SurvivorMemory:
    """One value per (slot, layer, KV head, token right after an event).

    Args:
        num_slots, num_layers, num_heads: sizes of the first three axes.
        max_tokens: most tokens that a head holds right after an event.
        dtype: float32 for credit, int32 for positions.
        device: where the memory lives.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_heads: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_slots, num_layers, num_heads, max_tokens)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def read(self, slots: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return [E, L, H, num_tokens] values, zero for tokens since the event."""
        stored = self.values[slots, :, :, :num_tokens]
        missing = num_tokens - stored.shape[-1]
        return torch.nn.functional.pad(stored, (0, missing)) if missing > 0 else stored

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the slots' values by [E, L, H, n], n <= max_tokens, and zeros."""
        self.values[slots] = 0
        self.values[slots, :, :, : values.shape[-1]] = values

    def clear(self, slots: torch.Tensor) -> None:
        """Zero the memory of slots that a new request takes over."""
        self.values[slots] = 0
