"""A plain decoder of models that decide with DMS, and what its decisions let be seen.

Written from the paper's rule; shares no code with the plugin.
"""

import json
from pathlib import Path
from typing import Any

import torch

from support.engine.reference_decoder import ReferenceDecoder

NEAR = 2e-2  # of logits, 100 times what decides


class DmsDecoder(ReferenceDecoder):
    """Qwen3 with a borrowed channel, or with adapters in front of each layer.

    Args:
        folder: model folder; borrows a channel unless there are adapters.
        adapters: `norm` [L, d] and `projection` [L, H, d].
        scale: factor on what decides.
        offset: taken from that.
        channel: which one is borrowed.
        zero_after_rope: it is hidden behind the rotation, too.

    After a forward pass `rows` has a layer's [H, T] of what decides, before scale and
    offset.
    """

    def __init__(
        self,
        folder: Path | str,
        adapters: dict[str, torch.Tensor] | None = None,
        scale: float = 100.0,
        offset: float = 5.0,
        channel: int = -1,
        zero_after_rope: bool = True,
    ) -> None:
        super().__init__(folder)
        self.adapters, self.scale_by, self.offset = adapters, scale, offset
        self.channel, self.zero_after_rope = channel, zero_after_rope

    def decisions(self, shift: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [L, H, T] bool: what is dropped, and what may go either way.

        Args:
            shift: tokens behind a token whose logit decides about it.
        """
        logits = torch.stack(self.rows) * self.scale_by - self.offset
        margin = torch.full_like(logits, torch.inf)
        size = logits.shape[-1] - shift  # nobody decides on the last ones
        margin[..., :size] = logits[..., shift:].abs()
        return dropped(logits, shift), margin < NEAR

    def _attention(self, layer: int, hidden: torch.Tensor, visible: torch.Tensor):
        if self.adapters is not None:
            mean = hidden.square().mean(-1, keepdim=True)
            normed = hidden / (mean + self.eps).sqrt() * self.adapters["norm"][layer]
            self.rows.append((normed @ self.adapters["projection"][layer].T).T)
        return super()._attention(layer, hidden, visible)

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        is_query = heads.shape[0] == self.num_q_heads
        if self.adapters is not None or not is_query:
            return super()._rotate(heads)
        group = self.num_q_heads // self.num_heads
        self.rows.append(heads[::group, :, self.channel].clone())
        heads = heads.clone()
        heads[::group, :, self.channel] = 0
        turned = super()._rotate(heads)
        if self.zero_after_rope:
            turned[::group, :, self.channel] = 0
        return turned


def say_dms(folder: Path, **keys: Any) -> None:
    """Add keys to the config.json of a model folder."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def dropped(logits: torch.Tensor, shift: int) -> torch.Tensor:
    """Return [L, H, T] bool: tokens that their successors (or they) drop.

    The last `shift` tokens have no decision yet.
    """
    found = torch.zeros_like(logits, dtype=torch.bool)
    size = logits.shape[-1] - shift
    found[..., :size] = logits[..., shift:] > 0
    return found
