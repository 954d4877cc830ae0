"""Events on cached and shared superblocks: what is read, let go, taken and counted.

Owns the manager's side of prefix caching on vLLM's own block pool; no scheduler.
"""

from dataclasses import replace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from support.pool_engine import FIRST, PLAN, Engine, N
from support.request_plans import request_plan
from vllm_kvpolicy.block_manager.entry import Entry
from vllm_kvpolicy.block_manager.forecast import held_levels
from vllm_kvpolicy.block_manager.manager import Turnover
from vllm_kvpolicy.block_manager.planner import RequestState
from vllm_kvpolicy.block_manager.sharing import Shared
from vllm_kvpolicy.events import EventPlan, Footprint

PROMPT = replace(PLAN, prompt_len=FIRST)  # 104 tokens, 6 full superblocks, an event


def make_request(name: str, tokens: list[int], salt: str | None = None) -> Request:
    """Return a request whose superblocks have hashes."""
    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=9),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(N, sha256),
    )


def offer(engine: Engine, request: Request, num_tokens: int) -> None:
    """Offer a request's full superblocks to the cache, as vLLM does."""
    engine.manager.cache_blocks(request, num_tokens, replay_boundaries=())


def cached(engine: Engine) -> set[int]:
    """Return the ids of the superblocks that a prompt can find."""
    return {b.block_id for b in engine.pool.blocks if b.block_hash is not None}


def compute_prompt(engine: Engine, name: str, num_tokens: int = FIRST) -> Request:
    """Compute a prompt of tokens 0, 1, 2... and offer it to the cache."""
    request = make_request(name, list(range(num_tokens)))
    engine.add(name, replace(PLAN, prompt_len=num_tokens))
    engine.compute(name, 0, num_tokens)
    offer(engine, request, num_tokens)
    engine.planner.finish_step({name: num_tokens})
    return request


def adopt(engine: Engine, name: str, owner: str, num_tokens: int) -> Request:
    """Let a request take its first tokens from the cache."""
    request = make_request(name, list(range(FIRST)))
    engine.add(name, PROMPT)
    blocks = engine.manager.req_to_blocks[owner][: num_tokens // N]
    engine.manager.add_local_computed_blocks(name, blocks, num_tokens, 0)
    end = engine.compute(name, num_tokens, FIRST)
    offer(engine, request, end)
    engine.planner.finish_step({name: end - num_tokens})
    return request


def test_an_event_leaves_cached_superblocks_alone():
    engine = Engine(20, caching=True)
    request = compute_prompt(engine, "a")
    before, taken = engine.ids("a"), engine.free
    assert cached(engine) == set(before[:6])
    engine.compute("a", FIRST, 1)
    event = engine.event("a", 1)
    # All 6 below the frontier are cached: 4 fresh ones take the survivors.
    assert event.source_blocks == tuple(before[:6])
    assert not set(event.dest_blocks) & set(before)
    assert event.local_blocks == (before[6],)
    assert cached(engine) == set(before[:6])
    assert engine.free == taken + 6 - 4
    assert engine.manager.blocks_returned == 2
    # Nothing that comes later is offered.
    offer(engine, request, FIRST + 1)
    assert cached(engine) == set(before[:6])


def test_survivors_are_not_offered_where_offers_come_late():
    """Where vLLM speculates it offers what is confirmed, maybe after the event."""
    engine = Engine(20, caching=True)
    request = make_request("a", list(range(FIRST)))
    engine.add("a", PROMPT)
    engine.compute("a", 0, FIRST)
    offer(engine, request, 48)
    before = cached(engine)
    engine.planner.finish_step({"a": FIRST})
    engine.compute("a", FIRST, 1)
    assert len(engine.event("a", 1).dest_blocks) == 4
    offer(engine, request, FIRST + 1)
    assert cached(engine) == before and len(before) == 3


def test_a_full_pool_hands_out_what_the_request_has_let_go():
    engine = Engine(7, caching=True)
    compute_prompt(engine, "a")
    before = engine.ids("a")
    assert engine.free == 0
    engine.compute("a", FIRST, 1)
    event = engine.event("a", 1)
    assert set(event.dest_blocks) <= set(before[:6])
    # The last superblocks leave the cache first: a prefix stays.
    assert cached(engine) == set(before[:2]) and engine.free == 2


def test_superblocks_of_others_stay_where_they_are():
    engine = Engine(20, caching=True)
    compute_prompt(engine, "a")
    adopt(engine, "b", "a", 64)
    shared = engine.ids("a")[:4]
    assert engine.ids("b")[:4] == shared
    free = engine.free
    assert engine.wanted("b", FIRST, FIRST) == 0
    engine.planner.clip("b", FIRST, 1)
    # 4 fresh ones; 2 cached ones of its own go back, 4 others still hold.
    assert engine.wanted("b", FIRST, FIRST + 1) == 4 - 2
    engine.compute("b", FIRST, 1)
    event = engine.event("b", 1)
    assert event.source_blocks[:4] == tuple(shared)
    assert not set(event.dest_blocks) & set(event.source_blocks)
    assert engine.free == free - 2
    assert engine.ids("a")[:4] == shared
    engine.finish("a")
    engine.finish("b")
    assert engine.free == 20 and engine.planner.num_global_blocks == 0


def test_an_event_without_room_for_fresh_superblocks_waits():
    engine = Engine(9, caching=True)
    compute_prompt(engine, "a")
    adopt(engine, "b", "a", 80)
    assert engine.free == 0
    engine.planner.clip("b", FIRST, 1)
    # vLLM preempts somebody where this is more than the pool has.
    assert engine.wanted("b", FIRST, FIRST + 1) == 3 > engine.free
    engine.finish("a")
    assert engine.wanted("b", FIRST, FIRST + 1) == -2
    engine.compute("b", FIRST, 1)
    assert len(engine.event("b", 1).dest_blocks) == 4


def test_the_second_event_reads_local_superblocks_that_are_cached():
    engine = Engine(30, caching=True)
    # F = 96 + ... : the event at 128 leaves superblock 7 local and cached.
    compute_prompt(engine, "a", 128)
    first_ids = engine.ids("a")
    engine.compute("a", 128, 1)
    assert len(engine.event("a", 1).local_blocks) == 1
    local = first_ids[7]
    assert local in cached(engine)
    position = 129
    while position < 168:
        position = engine.compute("a", position, 168 - position)
    engine.planner.finish_step({"a": 1})
    engine.compute("a", 168, 1)
    event = engine.event("a", 1)
    assert local in event.source_blocks and local not in event.dest_blocks
    assert local in cached(engine)


def test_what_is_not_computed_is_taken_out_of_the_cache():
    engine = Engine(20, caching=True)
    request = make_request("a", list(range(FIRST)))
    engine.add("a", PROMPT)
    engine.manager.new_step_starts()
    engine.compute("a", 0, 48)
    offer(engine, request, 48)
    engine.manager.new_step_starts()
    engine.compute("a", 48, 40)
    offer(engine, request, 88)
    ids = engine.ids("a")
    assert cached(engine) == set(ids[:5])
    engine.manager.withdraw("a")
    assert cached(engine) == set(ids[:3])
    engine.manager.withdraw("a")
    assert cached(engine) == set(ids[:3])


def test_admission_counts_a_shared_prefix_until_the_event():
    engine = Engine(40, caching=True)
    compute_prompt(engine, "a", 96)
    blocks = engine.manager.req_to_blocks["a"][:5]
    engine.add("b", replace(PLAN, prompt_len=80))
    plan = replace(PLAN, prompt_len=80)
    whole = Footprint(plan, 4, N).peak_blocks(90)
    assert whole == 6

    def wanted(num_tokens: int, hits: list) -> int:
        return engine.manager.get_num_blocks_to_allocate(
            "b", num_tokens, hits, 80, 80, num_tokens, apply_admission_cap=True
        )

    assert wanted(90, blocks) == 1, "5 of 6 are there already"
    assert wanted(300, blocks) == Footprint(plan, 4, N).peak_blocks(300, 5) == 7
    engine.finish("a")
    assert wanted(90, blocks) == 6, "what nobody holds has to be taken"


def test_an_urgent_request_does_not_rely_on_what_less_urgent_ones_hold():
    engine = Engine(40, caching=True)
    compute_prompt(engine, "low")
    adopt(engine, "other", "low", 64)
    assert engine.manager.num_staying(()) == 7 + 3
    assert engine.manager.num_staying(("low",)) == 4 + 3, "four are the other's, too"
    assert engine.manager.num_staying(("low", "other")) == 0
    prefix = engine.manager.req_to_blocks["low"][:6]
    admission = Entry(engine.planner, engine.manager, 500, 100, late_steps=0)
    for leaving, expected in (((), 6), (("low",), 4), (("low", "other"), 0)):
        admission.shared.note_hit("new", prefix, frozenset(leaving))
        assert admission.shared.by_request["new"].loose == expected


@pytest.mark.parametrize("speed", [1, 2, 5])
def test_a_booking_counts_a_prefix_no_longer_than_to_the_soonest_event(speed: int):
    """Right drafts bring the event, after which nothing is shared, many steps early."""
    engine, drafts, shared = Engine(40, caching=True), 4, 5
    plan = replace(PLAN, prompt_len=80)
    engine.add("b", plan)
    admission = Entry(
        engine.planner, engine.manager, 500, 100, late_steps=0, num_drafts=drafts
    )
    # Others keep it for long.
    admission.shared.by_request["b"] = Shared(shared, 1000)
    request = make_request("b", list(range(80)))
    request.max_tokens = 60
    assert admission.admits(request, 64, 16)
    levels = admission.forecast.bookings["b"].levels
    state, event = engine.planner.states["b"], plan.next_event(1)
    footprint = state.footprint
    for step in range(1, 40):
        computed = 80 + speed * (step - 1)
        if computed - (80 + step - 1) > N:
            break  # it is booked anew here
        end = computed + 1 + drafts
        if computed < event:
            end = min(end, event)  # a step stops there
        for token in range(computed, end):
            held = held_levels(footprint, token, token + 1)[0]
            held -= shared * (token < event)
            assert held <= levels[step], (step, token)
    assert computed + drafts > event
    # Others account for what is shared as long as no event can have come.
    del admission.shared.by_request["b"]
    alone, _ = admission._levels(request, state, 64, 16)
    counted = [int(level) for level in alone - levels]
    num_steps = event - N - 80 + 1
    assert counted == [shared] * num_steps + [0] * (len(levels) - num_steps)


@pytest.mark.parametrize(
    ("window", "cached_tokens", "usable"),
    [
        (32, 160, 64),
        (32, 48, 48),
        (0, 160, 96),
        (7, 160, 96),
        (8, 160, 80),
        (8, 96, 80),
    ],
)
def test_a_hit_ends_before_the_queries_of_the_first_event(
    window, cached_tokens, usable
):
    """And leaves a token to compute that needs no window of queries."""
    engine = Engine(1)
    plan = request_plan(engine.planner, PLAN, 4, 2, window=window)
    assert plan.first_event == FIRST
    assert plan.usable_hit(cached_tokens) == usable


def test_a_hit_never_reaches_the_event_itself():
    engine = Engine(1)
    events = EventPlan(prompt_len=300, budget=64, interval=40, prefill_interval=96)
    plan = request_plan(engine.planner, events, 4, 2)
    assert plan.first_event == 96 and plan.usable_hit(288) == 80


def test_a_called_request_takes_all_but_behind_events_inside_its_prompt():
    """Nothing is offered behind these, and a window there may have no room."""
    engine = Engine(1)
    events = EventPlan(prompt_len=300, budget=64, interval=40, prefill_interval=96)
    plan = replace(request_plan(engine.planner, events, 4, 2), is_called=True)
    state = RequestState(plan)
    assert state.usable_hit(288) == 288
    state.inside = (130, 300)
    assert state.usable_hit(288) == 80
    assert state.usable_hit(32) == 32
    state.plan = replace(plan, num_drafts=96)  # which reach back over all before it
    assert state.usable_hit(288) == 0


def test_a_request_that_measures_its_tokens_takes_nothing():
    engine = Engine(1)
    plan = request_plan(engine.planner, PLAN, 4, 2)
    assert plan.usable_hit(160) == 96 and plan.usable_hit(0) == 0
    assert replace(plan, takes_hits=False).usable_hit(160) == 0


def test_turnover_by_example():
    a, b, c, d, e = blocks = Engine(5).pool.get_new_blocks(5)
    x, y = Engine(2).pool.get_new_blocks(2)
    turnover = Turnover(blocks, 4, lambda block: block in (d, e))
    assert turnover.num_fresh == 2 and turnover.let_go == [a, b, c]
    assert turnover.homes([x, y]) == [x, y, d, e]
    assert turnover.net_taken == 2 - 3
    b.ref_cnt = 2
    assert turnover.net_taken == 2 - 2
    assert Turnover(blocks, 1, lambda block: block in (d, e)).net_taken == -2 - 1
