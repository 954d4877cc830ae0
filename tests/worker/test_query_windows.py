"""Query windows in superblocks: each query at its place, and nothing else touched."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvpolicy.kernels.save_rows import save_rows
from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.protocol import StepCommands, WindowCapture
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.transfer import to_device_together

# A query takes G = 3 rows of 8 in a superblock: the third of a window straddles.
LAYERS, BLOCKS, HEADS, SIZE, DIM, GROUP = 2, 9, 2, 4, 5, 3
WIDTH, MOST_TOKENS, CPU = HEADS * GROUP * DIM, 12, torch.device("cpu")
LONG, SHORT = 5, 2  # windows of two policies: two superblocks and one

both_captures = pytest.mark.parametrize("is_captured", [False, True])


class World:
    """A cache of random numbers and the windows in it; `is_captured` is theirs."""

    def __init__(self, is_captured: bool = False) -> None:
        self.cache = torch.randn(LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
        pool = PagePool(list(self.cache), keys_are_columns=False)
        self.windows = QueryWindows(GROUP, MOST_TOKENS, CPU, is_captured)
        self.windows.bind(pool)
        self.before = self.content()

    def content(self) -> torch.Tensor:
        """Return a copy of the cache, [L, B * 2N, H * D]."""
        return self.cache.view(LAYERS, -1, HEADS * DIM).clone()

    def step(
        self, names: Sequence[str], starts: Sequence[int], *captures: WindowCapture
    ) -> torch.Tensor:
        """Compute tokens of requests that start at `starts`; return queries [L, T]."""
        common: Any = SimpleNamespace(query_start_loc_cpu=torch.tensor(starts))
        self.windows.plan(Step(common, names, StepCommands((), captures)))
        queries = torch.randn(LAYERS, starts[-1], HEADS * GROUP, DIM)
        for layer, query in enumerate(queries):
            self.observe(layer, query if layer else query.flatten(1))
        self.windows.end_step()
        return queries

    def observe(self, layer: int, queries: torch.Tensor) -> None:
        self.windows.observe(layer, queries, torch.empty(0), torch.empty(0))

    def read(self, window_tokens: int, *windows: tuple[int, ...]) -> torch.Tensor:
        """Return what an event of a policy reads, [E, L, Hq, W, D]."""
        events: Any = [
            SimpleNamespace(window_blocks=window, request_id=f"r{index}")
            for index, window in enumerate(windows)
        ]
        needs = Needs(window_tokens=window_tokens)
        numbers = self.windows.numbers(events, needs)
        batch: Any = SimpleNamespace(
            policy=SimpleNamespace(needs=needs),
            events=events,
            sent=to_device_together(numbers, CPU),
        )
        return self.windows.read(batch)["queries"]


def as_read(queries: torch.Tensor) -> torch.Tensor:
    """Return saved queries [L, W, Hq, D] as an event reads them, [L, Hq, W, D]."""
    return queries.transpose(1, 2)


@both_captures
def test_what_is_read_is_what_was_saved(is_captured: bool) -> None:
    """Two windows over two steps, in superblocks that are not neighbours."""
    world, a, b = World(is_captured), (7, 2), (3, 5)
    # a: its last two tokens of five, then three; b: four of its six, then one.
    first = world.step(
        ["a", "b"],
        [0, 5, 11],
        WindowCapture("b", b, 2, 0, 4),
        WindowCapture("a", a, 3, 0, 2),
    )
    other = world.step(
        ["b", "a"],
        [0, 1, 4],
        WindowCapture("a", a, 0, 2, 3),
        WindowCapture("b", b, 0, 4, 1),
    )
    found = world.read(LONG, a, b)
    assert found.shape == (2, LAYERS, HEADS * GROUP, LONG, DIM)
    saved = torch.cat([first[:, 3:5], other[:, 1:4]], 1)
    assert torch.equal(found[0], as_read(saved))
    saved = torch.cat([first[:, 7:11], other[:, :1]], 1)
    assert torch.equal(found[1], as_read(saved))
    assert torch.equal(world.read(LONG, b, a), found.flip(0))


@both_captures
def test_rows_lie_where_the_layout_says_and_all_others_stay(is_captured: bool) -> None:
    world, blocks = World(is_captured), (6, 1)
    queries = world.step(["a"], [0, 9], WindowCapture("a", blocks, 4, 0, LONG))
    expected = world.before.clone()
    rows = [6 * 8 + row for row in range(8)] + [1 * 8 + row for row in range(7)]
    expected[:, rows] = queries[:, 4:9].reshape(LAYERS, LONG * GROUP, HEADS * DIM)
    after = world.content()
    assert torch.equal(after[:, 1:], expected[:, 1:]), "row 0 is the null block's"


def test_policies_with_different_windows_share_a_pool() -> None:
    """The number of queries is the policy's, that of superblocks the request's."""
    world, a, b = World(), (8, 4), (6,)
    queries = world.step(
        ["a", "b", "c"],
        [0, 5, 8, 10],
        WindowCapture("a", a, 0, 0, LONG),
        WindowCapture("b", b, 1, 0, SHORT),
    )
    assert torch.equal(world.read(LONG, a)[0], as_read(queries[:, :5]))
    assert torch.equal(world.read(SHORT, b)[0], as_read(queries[:, 6:8]))
    assert not world.windows.serves(Needs())


@both_captures
def test_nothing_is_saved_outside_a_planned_step(is_captured: bool) -> None:
    world = World(is_captured)
    address = world.windows.targets.data_ptr()
    world.step(["a"], [0, 5], WindowCapture("a", (7, 2), 0, 0, LONG))
    saved = world.content()
    world.step(["a", "b"], [0, 5, 9])
    world.observe(1, torch.randn(MOST_TOKENS, WIDTH))
    world.windows.warm_up()
    assert torch.equal(world.content()[:, 1:], saved[:, 1:])
    assert world.windows.targets.data_ptr() == address, "graphs read them there"


@both_captures
def test_a_graph_always_contains_the_saving(is_captured: bool) -> None:
    """What is recorded before anything is planned saves what is planned later."""
    world = World(is_captured)
    before = save_rows.calls["reference"]
    world.observe(0, torch.randn(3, WIDTH))
    assert save_rows.calls["reference"] - before == is_captured
    replayed = world.windows.pool.vectors[0], world.windows.targets
    common: Any = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 3]))
    capture = WindowCapture("a", (4,), 1, 0, SHORT)
    world.windows.plan(Step(common, ["a"], StepCommands((), (capture,))))
    rows, targets = replayed
    queries = torch.randn(3, HEADS * GROUP, DIM)
    save_rows(rows, queries.flatten(1), targets)
    assert torch.equal(world.read(SHORT, (4,))[0, 0], queries[1:].transpose(0, 1))
    with pytest.raises(AssertionError, match="more tokens than planned"):
        world.observe(0, torch.randn(MOST_TOKENS + 1, WIDTH))


def test_tables_alone_take_memory_beside_the_pool() -> None:
    """One row number for each part of a step's tokens."""
    assert QueryWindows(GROUP, MOST_TOKENS, CPU).nbytes == MOST_TOKENS * GROUP * 8
