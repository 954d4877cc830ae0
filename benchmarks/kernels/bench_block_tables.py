"""Compares our page tables with the index layouts of Hard-KV, on the paper's profile.

    python -m benchmarks.kernels.bench_block_tables --out FILE

KV head h of layer l keeps N * 0.5 * 0.93389^l * 0.87215^h of N tokens, as in the
authors' code; at most half, as in the paper's P3, where appendix B.2 says a quarter. A
layout says where they lie and what a step's attention walks:

sparse   nothing moves: one list of all N tokens, which every head of every layer walks
         under a bit mask of its own.
rewrite  survivors move to the front of one list, without a mask. Fits equal shares
         only: every head keeps the mean of the profile.
max      each head's survivors move to the front of a list of its own, as long as the
         longest of any layer, so that layers can share it; a mask hides the rest.
sum      the allocations of a layer's heads lie one after the other in one list, as
         long as the widest layer's, which every head walks under its mask. (Over layers
         as well it would hold N * L * H * 12.5 % tokens.)
ours     each (layer, head) has a list of its own of whole pages, and any page of the
         request can be in any list.

A superblock has one page per (layer, head). Newest tokens are left out: they are the
same everywhere. Tables of the first four are models of the paper's, those of "ours"
and of "rewrite" are what the plugin builds: `RaggedTier`, `HeadTables`, `FoldedTables`
and `RequestTable`. Before anything is timed, its lists are compared with the
accounting.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import provenance
from benchmarks.printing import table
from benchmarks.report.layout_tables import HEADER, cells
from vllm_kvpolicy.commands.outputs import new_file
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.tiers.equal import PhysicalTables
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch, FoldedTables, HeadTables
from vllm_kvpolicy.worker.tiers.ragged import RaggedTier
from vllm_kvpolicy.worker.transfer import to_device_together

ID_BYTES = 4  # int32, ids of pages and lengths


@dataclass(frozen=True)
class Case:
    """What is laid out.

    Args:
        layers: L.
        heads: H, KV heads per layer.
        requests: R, all of the same length.
        page: tokens per page.
        tokens: N, tokens held before the event; whole pages.
    """

    layers: int
    heads: int
    requests: int
    page: int
    tokens: int

    def kept(self) -> torch.Tensor:
        """Return [L, H] int64, tokens that each head keeps, at least 1."""
        layer = torch.arange(self.layers, dtype=torch.float64)[:, None]
        head = torch.arange(self.heads, dtype=torch.float64)
        share = 0.5 * 0.93389**layer * 0.87215**head
        return (self.tokens * share).round().long().clamp(min=1)


@dataclass(frozen=True)
class Account:
    """What a layout costs.

    Args:
        superblocks: held per request.
        loaded: tokens that attention reads per request and step, all heads.
        rewritten: most tokens that an event copies, all heads.
        table_bytes: ids, masks and lengths that a step reads, all requests.
        kept: tokens that the profile keeps, all heads.
        held: tokens that the superblocks have room for, all heads.
    """

    superblocks: int
    loaded: int
    rewritten: int
    table_bytes: int
    kept: int
    held: int


def accounts(case: Case) -> dict[str, Account]:
    """Return the account of each layout, by name."""
    kept, heads = case.kept(), case.layers * case.heads
    total = int(kept.sum())
    pages = -(-kept // case.page)

    def account(superblocks: int, loaded: int, rewritten: int, size: int) -> Account:
        held = superblocks * heads * case.page
        return Account(
            superblocks, loaded, rewritten, size * case.requests, total, held
        )

    def shared(length: int, rewritten: int, masked: bool) -> Account:
        """Account for lists that all layers share, one per head where masked."""
        num_pages = -(-length // case.page)
        ids = ID_BYTES * num_pages * (case.heads if masked else 1)
        mask = heads * -(-length // 8) if masked else 0
        return account(num_pages, heads * length, rewritten, ids + mask)

    ours = -(-int(pages.sum()) // heads)
    filled = int(pages.sum()) * case.page
    # Step tables are padded to the longest list.
    table = heads * ID_BYTES * (int(pages.max()) + 1)
    return {
        "sparse": shared(case.tokens, 0, masked=True),
        "rewrite": shared(-(-total // heads), total, masked=False),
        "max": shared(int(kept.max()), total, masked=True),
        "sum": shared(int(kept.sum(-1).max()), total, masked=True),
        "ours": account(ours, filled, filled, table),
    }


class SharedLists:
    """The paper's tables: ids shared by all layers, a mask per layer and head.

    Args:
        num_pages: length of the lists, in pages.
        mask_bytes: bytes of each mask.
    """

    def __init__(
        self, case: Case, num_pages: int, mask_bytes: int, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(case.requests * num_pages, generator=generator)
        self.blocks = order.int().view(case.requests, num_pages).to(device)
        shape = (case.layers, case.requests, case.heads, mask_bytes)
        self.masks = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.rows = torch.randperm(case.requests, generator=generator).to(device)
        self.head = torch.arange(case.heads, dtype=torch.int32, device=device)

    def build(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch's head pages [R, H, P] int32 and masks [L, R, H, M] uint8."""
        blocks = self.blocks[self.rows, None]
        pages = blocks * len(self.head) + self.head[:, None]
        return pages, self.masks[:, self.rows]


class HeadPages:
    """The plugin's own tables after one event of every request."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.num_pages, rest = divmod(case.tokens, case.page)
        if rest:
            raise ValueError(f"tokens: expected whole pages of {case.page}")
        self.num_dest = accounts(case)["ours"].superblocks
        self.ids = [f"request {row}" for row in range(case.requests)]
        num_blocks = case.requests * (self.num_pages + 1)
        shape = (case.layers, num_blocks, case.heads, case.page, 2)
        pool = PagePool(
            list(torch.empty(shape, dtype=torch.uint8, device=device)), False
        )
        self.requests = RequestTable(case.requests, self.num_dest, case.page, device)
        block = torch.zeros(1, 1, dtype=torch.int64, device=device)
        own = pool.own_pages(block).flatten()
        tables = HeadTables(self.requests, num_blocks, own, case.heads)
        self.folded = FoldedTables(case.layers, case.heads, 0, 0, device)
        self.tier = RaggedTier(self.requests, pool, tables, self.folded)
        self.physical = PhysicalTables(self.requests, case.requests, case.tokens)
        order = torch.randperm(
            num_blocks, generator=torch.Generator().manual_seed(0)
        ).view(case.requests, -1)
        self.common = self._step(order)
        for request_id, blocks in zip(self.ids, order.tolist(), strict=True):
            self._event(request_id, blocks)

    def _step(self, blocks: torch.Tensor) -> SimpleNamespace:
        """Return what vLLM hands the metadata builder one token after the events."""
        requests = self.case.requests
        lengths = torch.full((requests,), self.case.tokens + 1, dtype=torch.int32)
        start = torch.arange(requests + 1, dtype=torch.int32)
        return SimpleNamespace(
            num_reqs=requests,
            max_query_len=1,
            seq_lens_cpu_upper_bound=lengths,
            seq_lens=lengths.to(self.device),
            block_table_tensor=blocks.int().to(self.device),
            query_start_loc=start.to(self.device),
        )

    def _event(self, request_id: str, blocks: Sequence[int]) -> None:
        """Give a request's heads their pages."""
        event = CompactEvent(
            request_id=request_id,
            serial=0,
            policy="hard-snapkv",
            ordinal=0,
            position=self.case.tokens,
            frontier_blocks=self.num_pages,
            budget=self.num_dest * self.case.page,
            sinks=0,
            prompt_tokens=self.case.tokens,
            num_global=0,
            source_blocks=tuple(blocks[:-1]),
            dest_blocks=tuple(blocks[: self.num_dest]),
            local_blocks=(),
        )
        token = torch.arange(self.case.tokens, device=self.device)
        keep = token < self.case.kept().view(1, -1, 1).to(self.device)
        rows = [self.requests.take(request_id)]
        policy: Any = SimpleNamespace(dynamic=True)
        sent = to_device_together(self.tier.numbers([event]), self.device)
        held = self.tier.held([event], sent)
        batch = Batch([event], policy, rows, sent, held)
        self.tier.commit(batch, self.tier.assign(batch, self.tier.quota(batch, keep)))
        self.requests.update(rows, [event], sent)

    def build(self) -> FoldedBatch:
        """Return the tables of a step in which lists have changed."""
        self.folded.forget(self.ids)
        return self.build_again()

    def build_again(self) -> FoldedBatch:
        """Return the tables of a step in which none has."""
        return self.folded.fold(self.tier.lists, self.common, self.ids)

    def build_equal(self, superblocks: int) -> torch.Tensor:
        """Return [R, P] int32, a step's table if all heads held `superblocks`."""
        slots = self.requests.rows(self.ids, len(self.ids))
        rows = torch.from_numpy(slots).to(self.device)
        common = self.common
        tables, _ = self.physical.fill(
            rows, common.block_table_tensor, common.seq_lens, superblocks + 1
        )
        return tables

    def verify(self) -> None:
        """Raise RuntimeError unless lists are as long as accounted, and disjoint."""
        case, batch = self.case, self.build()
        pages = -(-case.kept() // case.page)
        lengths = batch.lengths.view(case.layers, case.requests, case.heads).cpu()
        column = torch.arange(batch.tables.shape[-1], device=self.device)
        in_use = column < -(-batch.lengths // case.page)[..., None]
        ids = batch.tables[in_use]
        expected = pages[:, None] * case.page + 1
        if not (lengths == expected).all() or len(ids.unique()) != len(ids):
            raise RuntimeError("the plugin's lists differ from the accounting")


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return how long a call takes, device work included."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finish()
    start = time.perf_counter()
    call()
    finish()
    return (time.perf_counter() - start) * 1e3


def measure(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return accounts, and median times.

    Args:
        repeats: timed ones, after one that is not; layouts take turns.
    """
    costs, ours = accounts(case), HeadPages(case, device)
    ours.verify()
    builds: dict[str, Callable[[], Any]] = {}
    for name in ("sparse", "max", "sum"):
        length = costs[name].loaded // (case.layers * case.heads)
        lists = SharedLists(case, costs[name].superblocks, -(-length // 8), device)
        builds[name] = lists.build
    equal = costs["rewrite"].superblocks
    builds["rewrite"] = lambda: ours.build_equal(equal)
    builds |= {"ours": ours.build, "ours, same lists": ours.build_again}
    rounds = [
        {name: milliseconds(build, device) for name, build in builds.items()}
        for _ in range(repeats + 1)
    ][1:]
    return {
        **asdict(case),
        "layouts": {name: asdict(cost) for name, cost in costs.items()},
        "build_ms": {
            name: statistics.median(times[name] for times in rounds) for name in builds
        },
    }


def told(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row per case and layout."""
    rows = [
        [
            *(str(result["page"]), str(result["tokens"]), name),
            *cells(result, cost),
            f"{result['build_ms'][name]:.3f}",
        ]
        for result in results
        for name, cost in result["layouts"].items()
    ]
    return table(["page", "N", "layout", *HEADER, "build, ms"], rows)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lengths = list(range(2048, 20481, 2048))
    parser.add_argument("--tokens", type=int, nargs="+", default=lengths)
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=new_file, help="also write the figures to this file"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; `arguments` are those of the process unless given."""
    args = parse_args(arguments)
    device = torch.device(args.device)
    record = provenance.collect("benchmarks.kernels.bench_block_tables")
    record["device"] = str(device)
    record["threads"] = torch.get_num_threads()
    if device.type == "cuda":
        record["device"] = torch.cuda.get_device_name(device)
    results = [
        measure(
            Case(args.layers, args.heads, args.requests, page, tokens),
            device,
            args.repeats,
        )
        for page in args.pages
        for tokens in args.tokens
    ]
    print(told(results))
    if args.out is not None:
        content = {"provenance": record, "repeats": args.repeats, "results": results}
        args.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
