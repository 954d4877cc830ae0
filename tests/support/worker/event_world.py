"""The worker's side of an event without an engine: tables, and what happens on them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from support.worker.loaded_model import loaded_model
from support.worker.tiers import make_tier
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.compose import POSITIONS
from vllm_kvpolicy.policies.names import parse, resolve
from vllm_kvpolicy.protocol import CompactEvent, StepCommands, WindowCapture
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.captures.token_signals import TokenSignals
from vllm_kvpolicy.worker.compaction import Compactor
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.equal import PhysicalTables
from vllm_kvpolicy.worker.transfer import to_device

LAYERS, HEADS, GROUP, DIM, SIZE, BLOCKS = 2, 2, 2, 8, 4, 80
NUM_HEADS, NUM_SLOTS = LAYERS * HEADS, 4
RECENT, POSITION, STEP, BUDGET = 4, 48, 16, 24
REQUESTS = ("a", "b")
# Superblocks of their query windows, room for 32 queries in each.
LENT = (tuple(range(60, 68)), tuple(range(68, 76)))
# Where tokens of the requests start, and the last end.
STARTS = (0, STEP, 2 * STEP)


class HostTensor:
    """Stands for `STARTS` on the host, where all other tensors may be fake."""

    def numpy(self) -> np.ndarray:
        return np.array(STARTS)


class World:
    """A worker's tables, and what happens to two requests on them.

    Args:
        draw: makes keys, values and queries, as torch.zeros does.
        options: the policy's own, defaults apart.
    """

    def __init__(
        self, name: str, device: str, draw: Any = torch.zeros, **options: Any
    ) -> None:
        where, self.draw = torch.device(device), draw
        found = resolve(parse(name), options)
        self.policy = factory.assemble(found)
        needs = self.policy.needs
        shape = (LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
        self.caches = draw(*shape, device=where)
        self.pool = PagePool(list(self.caches), False)
        self.requests = RequestTable(NUM_SLOTS, BLOCKS, SIZE, where)
        model = loaded_model(LAYERS, NUM_SLOTS, 200, 100, DIM, where)
        signals = TokenSignals(needs.signals, model)
        windows = QueryWindows(GROUP, 100, where)
        windows.bind(self.pool)
        self.captures = [windows, signals] if needs.signals else [windows]
        names = needs.memory + (POSITIONS,) * needs.positions
        self.compactor = Compactor(
            policies={name: self.policy},
            pool=self.pool,
            tier=make_tier(found.is_ragged, self.requests, self.pool),
            requests=self.requests,
            captures=self.captures,
            memory=SurvivorMemory(
                names, self.requests, BLOCKS, NUM_HEADS, RECENT + SIZE - 1
            ),
            rope=Rope.from_theta(1e4, DIM),
            scale=1.0,
        )
        self.name = name
        self.held: dict[str, list[int]] = {request: [] for request in REQUESTS}
        self.free = list(range(1, LENT[0][0]))

    def step(self, ordinal: int) -> None:
        """Compute some tokens of both requests, then give both an event."""
        self.compactor.run(self.events(ordinal))
        rows = to_device(self.requests.rows(REQUESTS, 3), self.requests.device)
        table = torch.zeros(3, BLOCKS, dtype=torch.int32, device=self.requests.device)
        lengths = torch.zeros(3, dtype=torch.int32, device=self.requests.device)
        physical = PhysicalTables(self.requests, 3, BLOCKS)
        self.tables = physical.fill(rows, table, lengths, BLOCKS)

    def events(self, ordinal: int) -> list[CompactEvent]:
        """Compute some tokens of both requests; return the events that are due."""
        position = POSITION + ordinal * STEP
        self._forward(position)
        return [self._event(n, ordinal, position) for n in range(len(REQUESTS))]

    def _forward(self, position: int) -> None:
        """Measure what the step's last tokens show."""
        device = self.requests.device
        metadata = SimpleNamespace(
            num_reqs=2,
            num_actual_tokens=2 * STEP,
            query_start_loc=to_device(STARTS, self.requests.device),
            query_start_loc_cpu=HostTensor(),
            seq_lens=to_device([position, position], self.requests.device),
        )
        window = self.policy.needs.window_tokens
        count = min(window, STEP)
        wanted = tuple(
            WindowCapture(request, blocks, STEP - count, window - count, count)
            for request, blocks in zip(REQUESTS, LENT, strict=True)
            if count
        )
        step = Step(metadata, REQUESTS, StepCommands((), wanted))
        for capture in self.captures:
            capture.plan(step)
        for layer in range(LAYERS):
            query = self.draw(2 * STEP, HEADS * GROUP, DIM, device=device)
            vectors = self.draw(2 * STEP, HEADS, DIM, device=device)
            for capture in self.captures:
                capture.observe(layer, query, vectors, vectors)
        for capture in self.captures:
            capture.end_step()

    def _event(self, number: int, ordinal: int, position: int) -> CompactEvent:
        request = REQUESTS[number]
        blocks = self.held[request]
        frontier = (position - RECENT) // SIZE
        num_local = position - frontier * SIZE
        num_dest = -(-(BUDGET - num_local) // SIZE)
        num_new = STEP // SIZE if ordinal else frontier + 1
        blocks += [self.free.pop() for _ in range(num_new)]
        source, local = tuple(blocks[:-1]), tuple(blocks[-1:])
        self.held[request] = [*source[:num_dest], *local]
        return CompactEvent(
            request_id=request,
            serial=ordinal,
            policy=self.name,
            ordinal=ordinal,
            position=position,
            frontier_blocks=frontier,
            budget=BUDGET,
            sinks=4,
            prompt_tokens=8,
            num_global=num_dest if ordinal else 0,
            source_blocks=source,
            dest_blocks=source[:num_dest],
            local_blocks=local,
            window_blocks=LENT[number],
        )
