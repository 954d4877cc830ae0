"""What events and decode steps may cost in launches; more than that is a step back."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from benchmarks.gpu.kernel_checks import forced
from support.sweeps import some
from support.words import built
from support.worker.event_world import World
from vllm_kvpolicy.policies.admissions.dms.policy import (
    DelayedEviction,
    attach_borrowed,
)
from vllm_kvpolicy.policies.selections.quest import Quest
from vllm_kvpolicy.protocol import StepCommands, WindowCapture
from vllm_kvpolicy.worker import transfer
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.captures.visible_until import VisibleUntil
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch
from vllm_kvpolicy.worker.tiers.page_selection import PageSelection, SelectedBatch

# Operators, Triton kernels and copies to the device: of a batch of third events,
EVENTS: dict[str, tuple[dict[str, Any], int]] = {
    "ams-tova": ({}, 53),
    "snapkv": ({}, 27),
    "streaming": ({}, 23),
    "adakv-snapkv": ({}, 41),
    "hard-snapkv": ({"hard_mode": "dynamic"}, 79),
}
# and what the plugin adds to a decode step, and to each layer of it.
STEPS = {"dms": (46, 5), "quest": (16, 2), "query windows": (6, 1)}
EVENTS_BEFORE = 2  # of each request: the counted ones find survivors
FREE = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")
COPY = "copy to the device"
LAYERS, HEADS, GROUP, DIM, SIZE, BLOCKS = 2, 2, 2, 8, 4, 80
REQUESTS, HELD, MOST, BUDGET = 3, 45, 14, 14
NAMES = tuple("abc")
CPU = torch.device("cpu")
# What a step does, and what each of its layers does.
Phases = tuple[Callable[[], Any], Callable[[int], Any]]


class Launches(TorchDispatchMode):
    """Counts by name what a GPU would be asked to do.

    That is every PyTorch operator that computes, every Triton kernel and every copy of
    host integers. A kernel under the interpreter counts once, whatever it calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._in_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        if not (self._in_kernel or func.is_view or name in FREE):
            self.counts[name] += 1
        return func(*args, **kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count until the end of the block."""
        run, copy = GridExecutor.__call__, transfer.to_device

        def launch(grid: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[f"triton {grid.fn.__name__}"] += 1
            self._in_kernel = True
            try:
                return run(grid, *args, **kwargs)
            finally:
                self._in_kernel = False

        def send(*args: Any) -> torch.Tensor:
            self.counts[COPY] += 1
            return copy(*args)

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(GridExecutor, "__call__", launch)
            for module in _modules_with(copy):
                patch.setattr(module, "to_device", send)
            yield


def _modules_with(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the package's modules that call a function of `transfer` by its name."""
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("vllm_kvpolicy.worker")
        if is_ours and getattr(module, function.__name__, None) is function:
            yield module


def launches_of_events(name: str, **options: Any) -> Counter[str]:
    """Return what the third events of two requests cost, in one batch.

    Args:
        name: the policy.
        options: the policy's own, defaults apart.
    """
    generator = torch.Generator().manual_seed(5)
    counter = Launches()
    with forced("reference"):
        world = World(name, "cpu", partial(torch.randn, generator=generator), **options)
        for ordinal in range(EVENTS_BEFORE):
            world.step(ordinal)
    with forced("triton"):
        events = world.events(EVENTS_BEFORE)
        with counter.watching():
            world.compactor.run(events)
    return counter.counts


def names(counts: Counter[str]) -> Iterator[str]:
    """Yield a line for each kind of launch."""
    for name, count in counts.most_common():
        yield f"{count:5} {name}"


@pytest.mark.parametrize("name", some([*EVENTS]))
def test_a_batch_of_events_launches_no_more(name: str) -> None:
    options, limit = EVENTS[name]
    counts = launches_of_events(name, **options)
    print(f"\n{name}: {counts.total()}", *names(counts), sep="\n")
    assert counts.total() <= limit, counts


# -- decode steps ----------------------------------------------------------------------


def launches_of_decoding(name: str) -> tuple[Counter[str], Counter[str]]:
    """Return what one decode step of three requests costs, once and in each layer.

    Args:
        name: "dms", "quest" or "query windows".
    """
    generator = torch.Generator().manual_seed(3)
    pool = PagePool(
        list(torch.randn(LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM, generator=generator)),
        False,
    )
    with forced("triton"):
        step, layer = PHASES[name](pool)
        whole, each = Launches(), Launches()
        with whole.watching():
            step()
        for index in range(LAYERS):
            with each.watching():
                layer(index)
    counts = each.counts
    assert all(count % LAYERS == 0 for count in counts.values()), counts
    return whole.counts, Counter({k: n // LAYERS for k, n in counts.items()})


def metadata() -> Any:
    """Return a decode step as vLLM describes it: one token of each request."""
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    held = torch.full((REQUESTS,), HELD, dtype=torch.int32)
    columns = -(-HELD // SIZE)
    blocks = 1 + torch.arange(REQUESTS * columns, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=REQUESTS,
        num_actual_tokens=REQUESTS,
        seq_lens=held,
        seq_lens_cpu_upper_bound=held,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        block_table_tensor=blocks.view(REQUESTS, columns),
    )


class Projection(nn.Linear):
    """A linear layer that returns a pair, as vLLM's do."""

    def forward(self, values: torch.Tensor) -> Any:
        return values, None


def _dms(pool: PagePool) -> Phases:
    """A borrowed channel decides; the rotation and attention itself do not count."""
    decider = DelayedEviction(None, DelayedEviction.Options())
    rows, attentions = HEADS * GROUP, list[nn.Module]()
    for _ in range(LAYERS):
        logits = torch.zeros(REQUESTS, HEADS)
        attention = nn.Module()
        attention.head_dim, attention.attn = DIM, nn.Identity()
        attention.qkv_proj = Projection(1, 1)
        attach_borrowed(attention, decider.rule, logits, rows, torch.float32)
        decider._logits.append(logits)
        attentions.append(attention)
    capture = VisibleUntil(decider, 4, SIZE, HEADS, REQUESTS, CPU)
    capture.bind(pool)
    given = torch.randn(REQUESTS, (rows + 2 * HEADS) * DIM)
    key = torch.randn(REQUESTS, HEADS, DIM)

    def layer(index: int) -> None:
        projected, _ = attentions[index].qkv_proj(given)
        query = attentions[index].attn(projected[:, : rows * DIM])
        capture.observe(index, query, key, key)

    def step() -> None:
        capture.plan(Step(metadata(), NAMES, StepCommands((), ())))

    return step, layer


def _quest(pool: PagePool) -> Phases:
    """Every request has had an event; tables are filled already."""
    requests = RequestTable(4, MOST, SIZE, CPU)
    selection = PageSelection(
        built(Quest, quest_budget=BUDGET), ["q"], requests, pool, GROUP
    )
    rows = [requests.take(name) for name in NAMES]
    requests.frontier_blocks_cpu[rows] = 10
    event: Any = SimpleNamespace(policy="q", prompt_tokens=4)
    pages = torch.arange(BLOCKS * HEADS * LAYERS).view(1, -1)
    selection.update(rows, [event] * REQUESTS, pages)
    count = REQUESTS * HEADS
    tables = torch.arange(LAYERS * count * MOST, dtype=torch.int32)
    folded = FoldedBatch(
        tables.view(LAYERS, count, MOST) % BLOCKS,
        torch.full((LAYERS, count), HELD, dtype=torch.int32),
        torch.arange(count + 1, dtype=torch.int32),
        HELD,
        None,
    )
    query = torch.randn(REQUESTS, HEADS * GROUP, DIM)
    batches: list[Any] = []

    def step() -> None:
        batches.append(selection.narrow(metadata(), NAMES, folded))

    def layer(index: int) -> None:
        assert isinstance(batches[0], SelectedBatch)
        batches[0].of_layer(index, query)

    return step, layer


def _query_windows(pool: PagePool) -> Phases:
    """Two of three requests are near an event."""
    capture = QueryWindows(GROUP, REQUESTS, CPU)
    capture.bind(pool)
    query = torch.randn(REQUESTS, HEADS * GROUP, DIM)
    wanted = tuple(WindowCapture(NAMES[n], (60 + n,), 0, 1, 1) for n in range(2))

    def step() -> None:
        capture.plan(Step(metadata(), NAMES, StepCommands((), wanted)))

    def layer(index: int) -> None:
        capture.observe(index, query, query, query)

    return step, layer


PHASES: dict[str, Callable[[PagePool], Phases]] = {
    "dms": _dms,
    "quest": _quest,
    "query windows": _query_windows,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_decode_step_launches_no_more(name: str) -> None:
    step, layer = launches_of_decoding(name)
    print(f"\n{name}, once in a step: {step.total()}", *names(step), sep="\n")
    print(f"{name}, in each layer: {layer.total()}", *names(layer), sep="\n")
    assert step.total() <= STEPS[name][0] and layer.total() <= STEPS[name][1]
