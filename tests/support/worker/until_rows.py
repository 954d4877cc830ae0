"""Rows of until_attention on scattered pages, and what they see, by definition."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.visibility import visible, visible_until

Arguments = dict[str, object]


@dataclass(frozen=True)
class Row:
    """One (request, KV head) in a step.

    Args:
        tokens: logical tokens so far, this step's included.
        queries: of this step.
        kept: share of tokens that are kept.
        window: that all others are seen within.
        gone: share of the tokens that no query sees which left the cache.
    """

    tokens: int
    queries: int
    kept: float = 0.3
    window: int = 8
    gone: float = 0.7


class Step:
    """Rows with random keys, values and bits.

    Args:
        rows: of the step.
        group, size, page: G, D and N.
        dtype: of keys, values and queries.
        columns: keys are stored [D, N].
        garbage: what lies in slots that nobody sees.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        group: int = 3,
        size: int = 32,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        columns: bool = False,
        garbage: float = torch.nan,
    ) -> None:
        self.rows = rows
        self.generator = generator = torch.Generator().manual_seed(0)
        width = 2 + max(-(-row.tokens // page) for row in rows)
        count = len(rows) * width + 2
        shape = count, page, size
        self.keys, self.values = (torch.full(shape, garbage).to(dtype) for _ in "kv")
        if columns:
            self.keys = self.keys.transpose(1, 2).contiguous().transpose(1, 2)
        self.until = torch.randint(0, 2**31, (count, page), generator=generator).int()
        order = torch.randperm(count, generator=generator)[: len(rows) * width]
        self.tables = order.view(len(rows), width).int()
        self.lengths = torch.zeros(len(rows), dtype=torch.int32)
        self.query = torch.randn(
            sum(row.queries for row in rows), group, size, generator=generator
        ).to(dtype)
        self.scale = size**-0.5
        expected = []
        start = 0
        for number, row in enumerate(rows):
            query = self.query[start : start + row.queries]
            expected.append(self._fill(number, row, query))
            start += row.queries
        self.expected = torch.cat(expected)

    def _fill(self, number: int, row: Row, query: torch.Tensor) -> torch.Tensor:
        """Put a row's tokens on its pages; return what attention gives, float64."""
        size, page = self.keys.shape[2], self.keys.shape[1]
        keys, values = torch.randn(2, row.tokens, size, generator=self.generator).to(
            self.query.dtype
        )
        drawn = torch.rand(2, row.tokens, generator=self.generator)
        until = visible_until(drawn[0] < row.kept, row.window)
        positions = torch.arange(row.tokens - row.queries, row.tokens)
        sees = visible(until, positions)
        is_gone = ~sees.any(0) & (drawn[1] < row.gone)
        held = (~is_gone).nonzero()[:, 0]
        self.lengths[number] = len(held)
        place = torch.arange(len(held))
        pages, slots = self.tables[number, place // page].long(), place % page
        self.until[pages, slots] = until[held]
        is_seen = sees.any(0)[held]
        self.keys[pages[is_seen], slots[is_seen]] = keys[held[is_seen]]
        self.values[pages[is_seen], slots[is_seen]] = values[held[is_seen]]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.double().transpose(0, 1),
            *(part.double().expand(query.shape[1], -1, -1) for part in (keys, values)),
            attn_mask=sees,
            scale=self.scale,
        )
        return attended.transpose(0, 1)

    def arguments(self) -> Arguments:
        """Return the operation's arguments, with fresh memory for its output."""
        counts = torch.tensor([0, *(row.queries for row in self.rows)])
        return {
            "query": self.query,
            "keys": self.keys,
            "values": self.values,
            "tables": self.tables,
            "lengths": self.lengths,
            "query_start": counts.cumsum(0).int(),
            "ends": torch.tensor([row.tokens for row in self.rows]).int(),
            "until": self.until,
            "scale": self.scale,
            "output": torch.full_like(self.query, torch.nan),
            "max_queries": max(row.queries for row in self.rows),
        }
