"""The Quest oracle: a plain decoder whose generated tokens choose pages themselves.

Under the survivors that the server recorded, each query of a generated token behind an
event scores the pages of N survivors by their smallest and largest keys, in float64 and
from the decoder's own keys and queries, and no longer sees the pages with the lowest
scores.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.engine.oracle_replay import check_replay
from support.engine.reference_decoder import ReferenceDecoder


class QuestDecoder(ReferenceDecoder):
    """A reference decoder for one request at a time.

    Args:
        budget: tokens per KV head that a query reads, local tokens included.
        block_size: N.

    Attributes:
        choices: queries that had more pages than they might read, by head and layer.
        unread: pages that they did not read.
        closest: smallest difference of scores at a cut.
    """

    def __init__(self, folder: Path, budget: int, block_size: int) -> None:
        super().__init__(folder)
        self.budget, self.block_size = budget, block_size
        self.choices, self.unread, self.closest = 0, 0, np.inf
        self.result: Any = None

    def check(self, result: Any) -> float:
        """Compare every log-probability of a request; see `check_replay`."""
        self.result = result
        return check_replay(self, result)

    def _attention(
        self, layer: int, hidden: torch.Tensor, visible: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        _, query, key, _ = super()._attention(layer, hidden, visible)
        visible = visible.clone()
        group = self.num_q_heads // self.num_heads
        for head in range(self.num_heads):
            queries = query[head * group : (head + 1) * group].double().numpy()
            keys = key[head].double().numpy()
            self._narrow(visible[head], layer, head, queries, keys)
        return super()._attention(layer, hidden, visible)

    def _narrow(
        self,
        visible: torch.Tensor,
        layer: int,
        head: int,
        queries: np.ndarray,
        keys: np.ndarray,
    ) -> None:
        """Hide pages of one head from its queries.

        Args:
            visible: [T, T] bool, mutated.
            queries: [G, T, D].
            keys: [T, D].
        """
        events, size = self.result.events, len(keys)
        ends = [event.position for event in events[1:]] + [size]
        for event, end in zip(events, ends, strict=False):
            row = event.survivors[layer, head]
            row = np.r_[np.arange(event.pinned), row[row >= 0]]
            pages = row.reshape(-1, self.block_size)
            low, high = keys[pages].min(1), keys[pages].max(1)
            for query in range(max(event.position, len(self.result.job.prompt)), end):
                local = query + 1 - event.frontier
                count = -(-max(self.budget - local, 0) // self.block_size)
                if count >= len(pages):
                    continue
                parts = [
                    np.maximum(vector * low, vector * high).sum(-1)
                    for vector in queries[:, query]
                ]
                scores = np.max(parts, axis=0)
                best = sorted(range(len(pages)), key=lambda n: (-scores[n], n))
                visible[query, torch.from_numpy(pages[best[count:]]).long()] = False
                self.choices += 1
                self.unread += len(pages) - count
                if count:
                    gap = scores[best[count - 1]] - scores[best[count]]
                    self.closest = min(self.closest, gap)
