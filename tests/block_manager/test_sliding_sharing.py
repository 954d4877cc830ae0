"""Windows that requests share: what they hold together, take, offer and withdraw."""

from collections.abc import Sequence

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_kvpolicy.block_manager.forecast import window_levels
from vllm_kvpolicy.block_manager.manager import KVPolicySpec, own_manager
from vllm_kvpolicy.block_manager.other_groups import OtherBlocks, run_events_first
from vllm_kvpolicy.block_manager.planner import Planner, RequestPlan
from vllm_kvpolicy.events import EventPlan, Footprint
from vllm_kvpolicy.sizes import OtherGroups, PlannerLimits

N, WINDOW, LENGTH, GROUPS = 16, 40, 192, 2
SIZES = {"block_size": N, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
BLOCKS = -(-LENGTH // N)


class Engine:
    """vLLM's KV cache manager with a policy's group and two with a window."""

    def __init__(self, late_steps: int = 0) -> None:
        init_none_hash(sha256)
        window = SlidingWindowSpec(**SIZES, sliding_window=WINDOW)
        groups = [KVCacheGroupSpec([f"s{i}"], window) for i in range(GROUPS)]
        own = KVPolicySpec(**SIZES)
        self.cache = KVCacheManager(
            KVCacheConfig(
                num_blocks=201,
                kv_cache_tensors=[],
                kv_cache_groups=[*groups, KVCacheGroupSpec(["f"], own)],
                prefix_cache_retention_interval=0,
            ),
            max_model_len=1024,
            scheduler_block_size=N,
            hash_block_size=N,
            max_in_flight_tokens=LENGTH,
            enable_caching=True,
        )
        coordinator = self.cache.coordinator
        self.manager, others = own_manager(coordinator.single_type_managers)
        run_events_first(coordinator, self.manager)
        self.late_steps, self.requests = late_steps, dict[str, Request]()
        self.planner = Planner(PlannerLimits(N, 8))
        sizes = OtherGroups(WINDOW, 1, GROUPS, N, LENGTH, late_steps)
        self.others = OtherBlocks(sizes, others, self.num_processed)
        self.manager.attach(self.planner, self.others)

    @property
    def free(self) -> int:
        return self.cache.block_pool.get_num_free_blocks()

    @property
    def held_by_windows(self) -> int:
        return self.others.held_by(self.requests)

    def num_processed(self, name: str) -> int:
        """Return how many tokens of a request steps have computed that have ended."""
        request = self.requests[name]
        return request.num_computed_tokens - request.num_in_flight_tokens

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        prefill_interval: int = 4096,
        budget: int = 64,
    ) -> Request:
        events = EventPlan(len(prompt), budget, 32, prefill_interval)
        self.planner.add(name, RequestPlan("tova", Footprint(events, 8, N), 4))
        self.requests[name] = Request(
            name,
            list(prompt),
            SamplingParams(max_tokens=99),
            None,
            block_hasher=get_request_block_hasher(N, sha256),
        )
        return self.requests[name]

    def compute(self, request: Request, num_tokens: int) -> None:
        """Schedule tokens of a request in a step; look it up first if it is new."""
        self.cache.new_step_starts()
        name, computed = request.request_id, request.num_computed_tokens
        found = {}
        if not computed:
            blocks, computed, _ = self.cache.get_computed_blocks(request)
            found = {"num_new_computed_tokens": computed, "new_computed_blocks": blocks}
        assert self.planner.clip(name, computed, num_tokens) == num_tokens
        assert self.cache.allocate_slots(request, num_tokens, **found)
        self.planner.finish_step({name: num_tokens})
        request.num_computed_tokens = computed + num_tokens
        request.num_in_flight_tokens = num_tokens * self.late_steps

    def cached(self) -> list[list[bool]]:
        """Return which entries of a request's groups are cached, windows first."""
        return [
            [block.block_hash is not None for block in manager.req_to_blocks["a"]]
            for manager in (*self.others.managers, self.manager)
        ]


def share(late_steps: int = 0) -> tuple[Engine, Request, Request]:
    """Return an engine in which "b" has taken most of the prompt of "a"."""
    engine, prompt = Engine(late_steps), range(LENGTH)
    first, second = (engine.add(name, prompt) for name in "ab")
    engine.compute(first, LENGTH)
    hit, num_tokens, _ = engine.cache.get_computed_blocks(second)
    assert num_tokens == LENGTH - N
    assert [len(blocks) for blocks in hit.blocks] == [BLOCKS - 1] * 3
    engine.compute(second, N)
    return engine, first, second


def test_what_requests_share_is_counted_once() -> None:
    engine, _, _ = share()
    held = [engine.others.held(name) for name in "ab"]
    # Of 12 superblocks "b" has the 3 before it, which "a" has too, and a new one.
    assert held == [GROUPS * BLOCKS, GROUPS * 4]
    together = engine.others.held_by("ab")
    assert together == sum(held) - GROUPS * 3
    assert engine.manager.num_held_by("ab") - (BLOCKS - 1) == 200 - engine.free
    assert engine.others.held_by(()) == engine.others.held("c") == 0
    # Those that "a" holds, too, stay taken when "b" moves on.
    assert engine.others.held_by("b") == GROUPS
    assert engine.others.held_by("a") == GROUPS * (BLOCKS - 3)


@pytest.mark.parametrize("late_steps", [0, 1])
@pytest.mark.parametrize("num_others", [0, 1])
def test_what_others_hold_does_not_come_back(num_others: int, late_steps: int) -> None:
    """As many superblocks are taken as a step was said to need."""
    engine, first, second = share(late_steps)
    if not num_others:
        engine.cache.free(first)
    for request in (first, second):
        request.append_output_token_ids([7] * 60)
    taken = []
    for num_tokens in (1, 20, 11):  # an event, then two steps that move the window
        computed, before = second.num_computed_tokens, engine.free
        assert engine.planner.clip("b", computed, num_tokens) == num_tokens
        needed = engine.manager.num_needed("b", computed + num_tokens)
        engine.compute(second, num_tokens)
        assert before - engine.free == needed, num_tokens
        taken.append(needed)
    # The last step leaves a superblock of each window behind, or is about to.
    assert taken[-1] == (0 if num_others or late_steps else -GROUPS)


@pytest.mark.parametrize("late_steps", [0, 1])
def test_what_a_longer_step_has_left_comes_back_when_it_is_computed(
    late_steps: int,
) -> None:
    """A prompt in one step, then one token a step; and what that takes until later."""
    engine = Engine(late_steps)
    request = engine.add("a", range(LENGTH))
    engine.compute(request, LENGTH)
    request.append_output_token_ids([7] * 60)
    first_event = engine.planner.states["a"].plan.first_event
    assert first_event == LENGTH, "it takes no part in what windows take"
    behind = (LENGTH - WINDOW + 1) // N * GROUPS
    expected = [GROUPS - behind] if not late_steps else [GROUPS, -behind]
    for number, windows in enumerate(expected):
        computed, before = LENGTH + number, engine.held_by_windows
        needed = engine.others.needed("a", computed, computed + 1, 1)
        later = engine.others.needed("a", computed, computed + 30, 1)
        assert later >= needed
        engine.compute(request, 1)
        assert engine.held_by_windows - before == needed == windows


def test_a_window_is_kept_where_hits_end_and_none_past_the_first_event() -> None:
    engine = Engine()
    request = engine.add("a", range(LENGTH), prefill_interval=96)
    engine.compute(request, 96)
    plan = engine.planner.states["a"].plan
    assert plan.first_event == 96 and plan.usable_hit(LENGTH) == 80
    ends_at_80 = [index in (2, 3, 4) for index in range(6)]
    assert engine.cached() == [ends_at_80, ends_at_80, [True] * 6]
    other = engine.add("b", range(LENGTH), prefill_interval=96)
    found, num_tokens, _ = engine.cache.get_computed_blocks(other)
    assert num_tokens == 80 and len(found.blocks) == 3
    engine.compute(request, 96)
    for windows in engine.cached()[:2]:
        assert not any(windows[6:]), "windows behind the event"


def test_windows_that_are_not_computed_are_taken_out_of_the_cache() -> None:
    engine = Engine()
    request = engine.add("a", range(LENGTH))
    engine.compute(request, LENGTH)
    assert all(any(windows) for windows in engine.cached())
    engine.manager.withdraw("a")
    assert not any(any(windows) for windows in engine.cached())


@pytest.mark.parametrize("num_free", [0, 1, 2])
def test_windows_take_what_an_event_gives_back(num_free: int) -> None:
    """A model whose first layers have windows, in a pool that is nearly full."""
    engine = Engine()
    request = engine.add("a", range(LENGTH), budget=160)
    engine.compute(request, LENGTH)
    request.append_output_token_ids(5)
    engine.cache.new_step_starts()
    assert engine.planner.clip("a", LENGTH, 1) == 1 and engine.planner.due("a")
    engine.cache.coordinator.remove_skipped_blocks("a", LENGTH)
    engine.cache.block_pool.get_new_blocks(engine.free - num_free)
    needed = sum(
        each.get_num_blocks_to_allocate("a", LENGTH + 1, [], LENGTH, LENGTH, LENGTH + 1)
        for each in (engine.manager, *engine.others.managers)
    )
    assert needed == 1 < GROUPS, "the event gives back less than windows take"
    found = engine.cache.allocate_slots(request, 1)
    assert (found is not None) == (num_free >= needed)
    if found is not None:
        assert engine.free == num_free - needed
        assert engine.planner.due("a") is None


@pytest.mark.parametrize("late_steps", [0, 1])
@pytest.mark.parametrize("chunk", [1, 16, 100])
@pytest.mark.parametrize("last", [7, 60])
def test_levels_bear_what_long_steps_leave_behind(
    late_steps: int, chunk: int, last: int
) -> None:
    """Each step, before and after the request's turn in it, as vLLM gives back."""
    sizes = OtherGroups(WINDOW, 1, GROUPS, N, 100, late_steps)
    computed, held, levels = 300, 0, []
    counts = [chunk, last, *[1] * 60]
    for turn, count in enumerate(counts):
        in_flight = counts[turn - 1] if late_steps and turn else 0
        first = max(computed - in_flight - WINDOW + 1, 0) // N
        after = GROUPS * (-(-(computed + count) // N) - first)
        if turn == 1:
            end = computed + count
            levels = list(window_levels(sizes, (computed, end, end + 60), held))
            assert len(levels) == 61
        if turn:
            assert max(held, after) <= levels[turn - 1], turn
        computed, held = computed + count, after
    assert levels[5] <= held + GROUPS
