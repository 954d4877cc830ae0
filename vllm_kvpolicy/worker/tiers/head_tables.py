"""Page tables of heads of different lengths: of what events leave, and of a step.

`HeadTables` has the global pages of every (request, layer, KV head). The lists of a
request lie end to end at its superblocks, so that they take as much memory as a pool
has pages, however many requests there are and however long.

In a step KV heads are folded into the batch: every (request, KV head) becomes a row of
a stock paged kernel with one KV head and G query heads, its own page list and its own
length. The tables are filled once per step and read by the attention of each layer.
Where graphs are captured the tensors stay in place, so that a graph reads what the step
of its replay has put there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_kvpolicy.kernels.page_tables import enter_page_lists, head_page_tables
from vllm_kvpolicy.policies.ranks import ONE_RANK, Ranks
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.transfer import HostCopy, to_device

logger = init_logger("vllm.kv_policy")


class HeadTables:
    """Global pages of every head of every request, on the device.

    The last row belongs to no request and has empty lists.

    Example: three heads that hold pages [4, 7], [] and [2, 9, 1], in superblocks 3 and
    1, have the rows 3, [4, 7, 2], and 1, [9, 1, ...], of `pages`, and [0, 2, 2, 5] of
    `first`.

    Args:
        requests: has the superblocks of each request.
        num_blocks: B, superblocks of the pool.
        own_page: [n] int64, id of each head's page of superblock 0, n = L * H.
        stride: distance in ids between a head's pages of neighbouring superblocks.
        ranks: which hold the same superblocks.

    Attributes:
        pages: [B, n] int32 page ids.
        first: [num_requests + 1, n + 1] int32, where each head's list starts and ends.
    """

    def __init__(
        self,
        requests: RequestTable,
        num_blocks: int,
        own_page: torch.Tensor,
        stride: int,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        num_heads, size = len(own_page), requests.null_row + 1
        self.requests, self.ranks = requests, ranks
        self.own_page, self.stride = own_page, stride
        self.pages = requests.global_blocks.new_zeros((num_blocks, num_heads))
        self.first = self.pages.new_zeros((size, num_heads + 1))
        # By row, pages of the longest list and of all, on the rank that has most.
        self._counts = np.zeros((2, size), dtype=np.int64)
        self._arriving: dict[int, tuple[HostCopy, int]] = {}

    def clear(self, rows: Sequence[int], index: torch.Tensor) -> None:
        """Empty the lists in rows that a new request takes over."""
        self.first.index_fill_(0, index, 0)
        self._counts[:, list(rows)] = 0  # sync-ok: numpy
        for row in rows:
            self._arriving.pop(row, None)

    def update(
        self,
        rows: Sequence[int],
        index: torch.Tensor,
        dest: torch.Tensor,
        first: torch.Tensor,
        pages: torch.Tensor,
    ) -> HostCopy:
        """Replace the lists of some requests, whose superblocks become `dest`.

        Args:
            index: [E] int64, the same as `rows` on the device.
            dest: [E, D] int64.
            first: [E, n + 1] int64.
            pages: [E, n * D] int64 page ids.

        Returns:
            [2, E] pages of each request's longest list, and of all its lists, on the
            rank that has most: all ranks lay out the same number of tokens.
        """
        lists = index, dest, first, pages
        own = enter_page_lists(self.pages, self.first, *lists)
        counts = HostCopy(self.ranks.most(own))
        self._arriving |= {row: (counts, n) for n, row in enumerate(rows)}
        return counts

    def counts(self, rows: Sequence[int]) -> np.ndarray:
        """Return [2, E] pages of each request's longest list, and of all its lists.

        On any rank. Waits for the last update, which on a GPU belongs to an event that
        ended long before the next one.
        """
        for row in rows:
            if row in self._arriving:
                values, place = self._arriving.pop(row)
                self._counts[:, row] = values.read()[:, place]
        return self._counts[:, list(rows)]

    def most(self, rows: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """Return [R] upper bounds on the pages of each request's lists; does not wait.

        Args:
            rows: [R] rows of the table.
            otherwise: [R] bounds for requests whose last update is still running.
        """
        here = [row for row, (values, _) in self._arriving.items() if values.is_here()]
        self.counts(here)
        unknown = np.isin(rows, list(self._arriving))
        return np.where(unknown, otherwise, self._counts[0, rows])

    def expand(
        self,
        tables: torch.Tensor,
        offsets: torch.Tensor,
        which: torch.Tensor,
        rows: torch.Tensor,
        blocks: torch.Tensor,
        skip: torch.Tensor,
        pinned: torch.Tensor,
    ) -> None:
        """Put global pages behind pinned ones; see `head_page_tables_ref`."""
        batch = tables, offsets, which, rows, blocks, skip, pinned
        lists = self.requests.global_blocks, self.pages, self.first, self.own_page
        head_page_tables(*batch, *lists, self.stride)


SPARE = 8  # rows and columns by which a batch may grow before tables are replaced


@dataclass(frozen=True)
class FoldedBatch:
    """What attention reads in a step, rows in the order (request, KV head).

    Of a single layer, it has no axis L.

    Args:
        tables: [L, R * H, C] int32 page ids.
        lengths: [L, R * H] int32, tokens that each row reads, this step's included.
        query_start: [R * H + 1] int32, first query token of each row.
        max_length: no row holds more. For a batch without requests, with which a graph
            may be captured, it is vLLM's bound, since replays will hold more.
        order: [T * H] int64, place of each (token, KV head) among the folded queries;
            None where every request has one token, so that folding is a view.
        ends: [R * H] int32, logical position after each row's newest token; None where
            attention does not need it.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    query_start: torch.Tensor
    max_length: int
    order: torch.Tensor | None
    ends: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Folded query tokens: those of the step, once for each KV head."""
        return len(self.query_start) - 1 if self.order is None else len(self.order)

    def of_layer(self, layer: int, query: torch.Tensor) -> "FoldedBatch":
        """Return what one layer reads: all that is held.

        Args:
            query: [T, Hq, D] model dtype, post-RoPE.
        """
        return replace(self, tables=self.tables[layer], lengths=self.lengths[layer])


class FoldedTables:
    """The tables of a batch; rows that have changed since the step before are filled.

    Args:
        num_layers, num_heads: L and H.
        num_rows, num_pages: B rows of C pages, at most where they are final.
        is_final: the tensors must not be replaced by larger ones: graphs read them.

    Raises:
        ValueError: the device has no room for them.

    Attributes:
        pages: [L, B, H, C] int32 page ids.
        offsets: [L, B, H] int32, pages of a head minus superblocks of its request.
        lengths: [L, B, H] int32, tokens held.
        starts: [B * H + 1] int32, first query tokens.
        filled: what each row was filled for: a request and its number of superblocks.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        num_rows: int,
        num_pages: int,
        device: torch.device,
        is_final: bool = False,
    ) -> None:
        self.is_final = is_final
        self._head = torch.arange(num_heads, dtype=torch.int32).to(device)
        self._allocate(num_layers, num_rows, num_heads, num_pages)
        if is_final:
            size = self.pages.nbytes / 2**20
            logger.info("KV policy: %.0f MiB for per-head page tables", size)

    def _allocate(self, *shape: int) -> None:
        """Make the tensors, of L, B, H and C."""
        _, num_rows, num_heads, num_pages = shape
        self.filled: list[tuple[str, int] | None] = [None] * num_rows
        try:
            self.pages = torch.zeros(shape, dtype=torch.int32, device=self._head.device)
            self.offsets, self.lengths = self.pages.new_zeros(2, *shape[:3])
            self.starts = self.pages.new_zeros(num_rows * num_heads + 1)
        except torch.OutOfMemoryError:
            size = 4 * math.prod(shape) / 2**20
            raise ValueError(
                f"kv_policy: per-head page tables of {num_rows} requests with "
                f"{num_pages} pages each take {size:.0f} MiB, more than the device "
                "has free; lower --max-num-seqs or --max-model-len"
            ) from None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        tensors = self.pages, self.offsets, self.lengths, self.starts
        return sum(tensor.nbytes for tensor in tensors)

    def make_room(self, num_rows: int, num_pages: int) -> None:
        """Make larger tensors if a batch does not fit.

        Raises:
            RuntimeError: graphs read these, and the batch does not fit.
        """
        layers, rows, heads, columns = self.pages.shape
        if num_rows <= rows and num_pages <= columns:
            return
        if self.is_final:
            raise RuntimeError(
                f"{num_rows} requests of {num_pages} pages: expected at most {rows} "
                f"of {columns}, the size of the tables that captured graphs read"
            )
        if num_rows > rows:
            rows = max(num_rows + SPARE, 2 * rows)
        if num_pages > columns:
            columns = max(num_pages + SPARE, 2 * columns)
        self._allocate(layers, rows, heads, columns)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Fill the rows of these requests again: their page lists have changed."""
        gone = set(request_ids)
        if gone:
            self.filled = [
                None if key is None or key[0] in gone else key for key in self.filled
            ]

    def fold(
        self, lists: HeadTables, common: Any, request_ids: Sequence[str]
    ) -> FoldedBatch:
        """Return the tables of a step; rows beyond the requests are padding."""
        num_rows, block_size = common.num_reqs, lists.requests.block_size
        starts, order = common.query_start_loc[: num_rows + 1], None
        if common.max_query_len > 1:
            num_tokens = int(common.query_start_loc_cpu[num_rows])
            order = fold_order(starts, num_tokens, self._head)
        width = self._fill(lists, common, request_ids)
        held, offsets = common.seq_lens[:num_rows, None], self.offsets[:, :num_rows]
        lengths = self.lengths[:, :num_rows]
        torch.add(held, offsets, alpha=block_size, out=lengths)
        query_start = self.starts[: num_rows * len(self._head) + 1]
        fold_starts(query_start, starts, self._head)
        return FoldedBatch(
            tables=self.pages[:, :num_rows].flatten(1, 2),
            lengths=lengths.flatten(1),
            query_start=query_start,
            max_length=width * block_size if request_ids else common.max_seq_len,
            order=order,
        )

    def warm_up(self, lists: HeadTables, num_columns: int) -> None:
        """Fold a dummy batch, so that the kernels are compiled."""
        one = torch.ones(2, dtype=torch.int32, device=self._head.device)
        dummy = SimpleNamespace(
            num_reqs=1,
            max_query_len=1,
            max_seq_len=1,
            seq_lens=one[:1],
            seq_lens_cpu_upper_bound=torch.ones(1, dtype=torch.int32),
            query_start_loc=one.cumsum(0, dtype=torch.int32) - 1,
            block_table_tensor=one.new_zeros(1, num_columns),
        )
        self.fold(lists, dummy, ())
        self.filled[0] = None

    def _fill(self, lists: HeadTables, common: Any, request_ids: Sequence[str]) -> int:
        """Bring the rows of a batch up to date; return the columns in use."""
        requests, num_rows = lists.requests, common.num_reqs
        held = common.seq_lens_cpu_upper_bound.numpy()
        num_blocks = -(-held // requests.block_size)
        rows = requests.rows(request_ids, num_rows)
        skip = requests.skip_cpu[rows]
        num_pages = num_blocks - skip + lists.most(rows, skip)
        width = int(num_pages.max())
        self.make_room(num_rows, width)
        names = [*request_ids, *[""] * (num_rows - len(request_ids))]
        keys = list(zip(names, map(int, num_blocks), strict=True))
        changed = [n for n, key in enumerate(keys) if key != self.filled[n]]
        if changed:
            lists.expand(
                self.pages[..., :width],
                self.offsets,
                to_device(changed, requests.device),
                to_device(rows[changed], requests.device),
                common.block_table_tensor,
                requests.skip,
                requests.pinned,
            )
            self.filled[:num_rows] = keys
        return width


def fold_starts(
    query_start: torch.Tensor, starts: torch.Tensor, head: torch.Tensor
) -> None:
    """Write where the queries of each (row, KV head) start, and where the last end.

    Example: H = 2, and rows of 1 and 2 tokens: starts [0, 1, 3] become
    [0, 1, 2, 4, 6].

    Args:
        query_start: [R * H + 1] int32, mutated.
        starts: [R + 1] int32, first token of each row.
        head: [H] int32, 0 to H - 1.
    """
    num_heads = len(head)
    first = query_start[:-1].view(-1, num_heads)
    counts = starts.diff()[:, None]
    torch.addcmul(starts[:-1, None] * num_heads, counts, head, out=first)
    torch.mul(starts[-1:], num_heads, out=query_start[-1:])


def fold_order(
    starts: torch.Tensor, num_tokens: int, head: torch.Tensor
) -> torch.Tensor:
    """Return [T * H] int64 places of (token, KV head) among the folded queries.

    The folded queries are ordered by row, then KV head, then token of the row.

    Example: H = 2, and rows of 1 and 2 tokens: starts [0, 1, 3]. Token 0 is alone in
    its row, so its heads have places 0 and 1. Row 1 has places 2 to 5: head 0 of tokens
    1 and 2 at 2 and 3, head 1 at 4 and 5. The result is [0, 1, 2, 4, 3, 5].

    Args:
        starts: [R + 1] int32, first token of each row.
        head: [H] int32, 0 to H - 1.
    """
    token = torch.arange(num_tokens, dtype=torch.int32, device=starts.device)
    row = torch.searchsorted(starts, token, right=True) - 1
    first, end = starts[row], starts[row + 1]
    places = (first * len(head) + token - first)[:, None]
    return (places + (end - first)[:, None] * head).flatten().long()


def fold_queries(
    query: torch.Tensor, num_kv_heads: int, order: torch.Tensor | None
) -> torch.Tensor:
    """Return [T * H, G, D] of queries [T, Hq, D]; query head h reads KV head h // G."""
    heads = query.unflatten(1, (num_kv_heads, -1)).flatten(0, 1)
    return (
        heads if order is None else torch.empty_like(heads).index_copy_(0, order, heads)
    )


def unfold_output(
    folded: torch.Tensor, num_kv_heads: int, order: torch.Tensor
) -> torch.Tensor:
    """Return [T, Hq, D] of [T * H, G, D]: the reverse of `fold_queries`."""
    return folded[order].unflatten(0, (-1, num_kv_heads)).flatten(1, 2)
