"""One attention layer over physical tables after compaction, and who holds what.

Requests have random keys and values; some were cut down, every head to tokens of its
own. The backend writes the cache, the package's kernels move the survivors and make
the tables. What each head holds is known beside all that, from plain lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.tiers.equal import PhysicalTables
from vllm_kvpolicy.worker.transfer import to_device, to_device_together

POISON = 50.0  # in all places that nobody holds: it would win every softmax
NAME = "model.layers.0.self_attn.attn"
SPARE_BLOCKS = 3


@dataclass(frozen=True)
class Request:
    """How much a request holds.

    Args:
        computed: tokens, those of the step included.
        queries: tokens of the step.
        frontier: superblocks that the last event looked at, 0 without one.
        kept: superblocks that it left of them.
    """

    computed: int
    queries: int = 1
    frontier: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of the layer: H, G, D, N, and the type of its numbers."""

    heads: int
    group: int
    dim: int
    block: int
    dtype: torch.dtype


def requests(rng: Random, block: int, most: int, queries: int) -> list[Request]:
    """Return requests of many sorts, those with one query first.

    Args:
        block: N.
        most: tokens of the longest.
        queries: tokens of the step in the last two, 1 for a batch of decode steps.
    """
    some = rng.randint(2 * block, most)
    return [
        Request(1),
        Request(some),
        Request(3 * block, 1, 2, 1),
        Request(most, 1, most // block - 1, max(1, most // block // 4)),
        Request(some, 1, some // block - 1, 1),
        Request(2 * block + queries, queries, 1, 1),
        Request(most - 1, queries, (most - queries) // block - 1, 1),
    ]


class Layers:
    """Attention layers of one shape over the cache of some requests.

    Args:
        backend: one of the package's attention backends.
        vllm_config: of a model with this shape.
        shape: of each layer.
        device: where all of it lies.
    """

    def __init__(
        self,
        backend: Any,
        vllm_config: Any,
        shape: Shape,
        batch: Sequence[Request],
        device: torch.device,
        seed: int,
    ) -> None:
        self.backend, self.config, self.shape = backend, vllm_config, shape
        self.batch, self.device = list(batch), device
        self.rng, self.draws = Random(seed), torch.Generator().manual_seed(seed)
        self.scale = shape.dim**-0.5
        sizes = [-(-request.computed // shape.block) for request in batch]
        self.num_blocks = 1 + sum(sizes) + SPARE_BLOCKS
        free = self.rng.sample(range(1, self.num_blocks), self.num_blocks - 1)
        self.rows = [[free.pop() for _ in range(size)] for size in sizes]

    def draw(self, *size: int) -> torch.Tensor:
        """Return random numbers of the model's type."""
        drawn = torch.randn(size, generator=self.draws)
        return drawn.to(self.device, self.shape.dtype)

    def starts(self) -> list[int]:
        """Return where each request's queries start, and where the last ones end."""
        starts = [0]
        for request in self.batch:
            starts.append(starts[-1] + request.queries)
        return starts

    def make_layer(self, name: str) -> Any:
        """Return an attention layer of this name; vLLM's configuration is set."""
        shape = self.shape
        self.config.compilation_config.static_forward_context.pop(name, None)
        layer = Attention(
            shape.heads * shape.group,
            shape.dim,
            self.scale,
            shape.heads,
            cache_config=self.config.cache_config,
            prefix=name,
            attn_backend=self.backend,
        )
        return layer.to(self.device)

    def make_builder(self, names: list[str]) -> Any:
        """Return what builds the metadata of these layers."""
        shape = self.shape
        spec = FullAttentionSpec(
            block_size=shape.block,
            num_kv_heads=shape.heads,
            head_size=shape.dim,
            dtype=shape.dtype,
        )
        return self.backend.get_builder_cls()(spec, names, self.config, self.device)

    def write(
        self,
        number: int,
        layer: Any,
        cache: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write all tokens of a request [t, H, D], by the backend's own kernel."""
        size, position = self.shape.block, torch.arange(len(keys))
        slots = torch.tensor(self.rows[number])[position // size] * size
        slots = (slots + position % size).to(self.device)
        layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


class Scene(Layers):
    """A layer, its cache and the tables of a step; see the module.

    Attributes:
        query: [T, H * G, D] of the step's tokens.
        held: keys and values [t, H, D] of each request, as its heads should hold them.
        tables: [R, P] int32 superblocks and `lengths` [R] int32, as kernels read them.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        shape = self.shape
        with set_current_vllm_config(self.config):
            self.layer = self.make_layer(NAME)
            self.builder = self.make_builder([NAME])
        size = (self.num_blocks, shape.heads, shape.block, 2 * shape.dim)
        self.cache = torch.full(size, POISON, dtype=shape.dtype, device=self.device)
        self.pool = PagePool([self.cache], self.backend.keys_are_columns)
        count = sum(r.queries for r in self.batch)
        self.query = self.draw(count, shape.heads * shape.group, shape.dim)
        self.requests = RequestTable(
            len(self.batch), self.num_blocks, shape.block, self.device
        )
        self.held = [self._fill(number) for number in range(len(self.batch))]
        self.tables, self.lengths = self._tables()

    def _fill(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a request's tokens, carry out its event; return what it holds."""
        request, shape = self.batch[number], self.shape
        keys, values = (
            self.draw(request.computed, shape.heads, shape.dim) for _ in range(2)
        )
        self.write(number, self.layer, self.cache, keys, values)
        if not request.frontier:
            return keys, values
        below = request.frontier * shape.block
        chosen = [
            sorted(self.rng.sample(range(below), request.kept * shape.block))
            for _ in range(shape.heads)
        ]
        self._compact(number, torch.tensor(chosen, device=self.device))
        local = list(range(below, request.computed))
        index = torch.tensor([tokens + local for tokens in chosen]).T.to(self.device)
        index = index[..., None].expand(-1, -1, shape.dim)
        return keys.gather(0, index), values.gather(0, index)

    def _compact(self, number: int, chosen: torch.Tensor) -> None:
        """Move chosen tokens [H, K] to some of the request's superblocks."""
        request, row, size = self.batch[number], self.rows[number], self.shape.block
        below = row[: request.frontier]
        dest = self.rng.sample(below, request.kept)
        lists = torch.tensor([below, dest + below[len(dest) :]], device=self.device)
        source_pages, dest_pages = self.pool.own_pages(lists)[:, 0]
        place = torch.arange(chosen.shape[1], device=self.device).expand_as(chosen)
        source, target = (
            (pages.gather(1, token // size) * size + token % size).flatten()
            for pages, token in ((source_pages, chosen), (dest_pages, place))
        )
        first = torch.arange(len(chosen) + 1, device=self.device) * chosen.shape[1]
        moved = torch.zeros_like(source, dtype=torch.bool)  # all change pages
        for pages in (self.pool.keys[0], self.pool.values[0]):
            compact_pages(pages, source, target, first, moved)
        self.cache[sorted(set(below) - set(dest))] = POISON
        event = CompactEvent(
            request_id=str(number),
            policy="tova",
            budget=1,
            sinks=0,
            position=request.computed - request.queries,
            ordinal=0,
            serial=0,
            prompt_tokens=1,
            source_blocks=tuple(below),
            dest_blocks=tuple(dest),
            local_blocks=tuple(row[request.frontier :]),
            num_global=0,
            frontier_blocks=request.frontier,
        )
        rows = [self.requests.take(str(number))]
        numbers = self.requests.numbers(rows, [event])
        self.requests.update(rows, [event], to_device_together(numbers, self.device))

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the tables of the step, in a buffer that is wider than they are."""
        count, columns = len(self.batch), max(map(len, self.rows))
        table = [row + [0] * (columns - len(row)) for row in self.rows]
        names = [str(number) for number in range(count)]
        physical = PhysicalTables(self.requests, count, columns + 2)
        return physical.fill(
            to_device(self.requests.rows(names, count), self.requests.device),
            torch.tensor(table, dtype=torch.int32, device=self.device),
            torch.tensor([r.computed for r in self.batch], device=self.device).int(),
            max(-(-len(keys) // self.shape.block) for keys, _ in self.held),
        )

    def attend(self) -> torch.Tensor:
        """Return [T, H * G, D] of vLLM's kernels, called as in a step."""
        starts = torch.tensor(self.starts(), dtype=torch.int32)
        held = torch.tensor([len(keys) for keys, _ in self.held], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=self.lengths,
            seq_lens_cpu_upper_bound=held,
            max_seq_len=int(held.max()),
            num_reqs=len(held),
            num_actual_tokens=len(self.query),
            max_query_len=max(request.queries for request in self.batch),
            block_table_tensor=self.tables,
            slot_mapping=torch.zeros(len(self.query), dtype=torch.int64),
            causal=True,
        )
        tokens = [
            torch.cat([pair[side][-r.queries :] for r, pair in self._pairs()])
            for side in (0, 1)
        ]
        output = torch.full_like(self.query, POISON)
        with set_current_vllm_config(self.config):
            built = self.builder.build(0, common)
            forward = self.layer.impl.forward
            forward(self.layer, self.query, *tokens, self.cache, built, output)
        return output

    def _pairs(self) -> list[tuple[Request, tuple[torch.Tensor, torch.Tensor]]]:
        return list(zip(self.batch, self.held, strict=True))
