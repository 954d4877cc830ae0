"""What a scheduler tells of its requests, from one that a test plays."""

from base64 import b64decode
from types import SimpleNamespace

import pytest

from vllm_kvpolicy.observe import snapshots
from vllm_kvpolicy.observe.shared_files import SCHEDULER, Ring
from vllm_kvpolicy.observe.snapshots import Snapshots, shared_blocks

SIZE = 32
MANAGER = SimpleNamespace(
    block_size=SIZE,
    pool_counts=lambda: (9, 3),
    num_held=lambda name: 4,
    hashes=lambda request: request.block_hashes,
)


def request(name, computed, prompt=10):
    ids = list(range(100, 100 + computed))
    return SimpleNamespace(
        request_id=name,
        num_computed_tokens=computed,
        num_prompt_tokens=prompt,
        all_token_ids=ids,
        block_hashes=[(name, n) for n in range(computed // SIZE)],
    )


def scheduler_of(computed, waiting=0):
    """Return a scheduler with a pool of 20 superblocks, 12 of them held."""
    running = [request(f"r{index}", count) for index, count in enumerate(computed)]
    queued = [request(f"w{index}", 0) for index in range(waiting)]
    events = SimpleNamespace(events=SimpleNamespace(interval=48, budget=106))
    plan = {"policy": "ams-tova", "budget": 96, "footprint": events, "is_called": False}
    state = {"plan": SimpleNamespace(**plan), "is_uncut": False, "ordinal": 2}
    state |= {"dropped_tokens": 3 * SIZE, "pinned_tokens": SIZE}
    state |= {"frontier_blocks": 5, "global_blocks": 2}
    blocks = [SimpleNamespace(block_hash=1, ref_cnt=n % 2) for n in range(6)]
    pool = SimpleNamespace(num_gpu_blocks=21, blocks=blocks)
    pool.get_num_free_blocks = lambda: 8
    return SimpleNamespace(
        running=running,
        requests={each.request_id: each for each in (*queued, *running)},
        kv_policy_planner=SimpleNamespace(states={"r0": SimpleNamespace(**state)}),
        kv_policy_manager=MANAGER,
        kv_cache_manager=SimpleNamespace(block_pool=pool),
    )


@pytest.fixture
def told():
    """A scheduler's half, and its ring as somebody sees it who may listen."""
    own = Snapshots("one", True, lambda: None)
    return own, Ring(SCHEDULER.format("one"), create=False)


@pytest.fixture
def heard(told):
    """The same while somebody listens."""
    told[1].listen()
    return told


@pytest.fixture
def look(heard):
    """What is told of a scheduler."""

    def look(scheduler):
        own, listener = heard
        own.publish(scheduler)
        ((found,), _) = listener.read()
        return found

    return look


def test_a_scheduler_that_nobody_listens_to_is_not_looked_at(told):
    own, listener = told
    own.publish(None)
    own.publish_tokens(None, None)
    own.publish_preemption(None)
    assert listener.read() == ([], 0)


def test_a_snapshot_has_the_pool_and_what_stock_would_hold(look):
    found = look(scheduler_of([320, 290, 33], waiting=2))
    sizes = {"local": 9, "global": 3, "cached": 3, "free": 8, "total": 20}
    assert found["pool"] == {**sizes, "stock": 10 + 10 + 2}
    assert (found["running"], found["stock_running"], found["waiting"]) == (3, 2, 2)
    first, second, *_, last = found["requests"]
    assert (first["id"], first["policy"], first["events"]) == ("r0", "ams-tova", 2)
    assert (first["held"], first["returned"], first["blocks"]) == (320 - 96, 3, 4)
    assert (second["policy"], second["held"]) == ("none", 290)
    own_numbers = [(row["budget"], row["interval"]) for row in (first, second)]
    assert own_numbers == [(96, 48), (None, None)]
    assert last["id"] == "w1" and not last["running"]
    floors = [(row["floor"], row["uncut"]) for row in (first, second)]
    assert floors == [(None, False), (None, True)]
    assert [row["pinned"] for row in (first, second)] == [SIZE, 0]


def test_a_request_whose_events_are_called_for_has_a_floor(look):
    """Its budget and the prompt that it keeps."""
    scheduler = scheduler_of([320, 290])
    state = scheduler.kv_policy_planner.states["r0"]
    state.plan.is_called = state.is_uncut = True
    found = look(scheduler)
    rows = [(row["floor"], row["budget"], row["uncut"]) for row in found["requests"]]
    assert rows == [(106, 96, True), (None, None, True)]


def test_a_request_that_ends_in_this_step_does_not_run(look):
    """vLLM frees a request before it takes it off the list."""
    scheduler = scheduler_of([320, 64])
    del scheduler.requests["r0"]
    found = look(scheduler)
    assert [row["id"] for row in found["requests"]] == ["r1"]
    assert (found["running"], found["pool"]["stock"]) == (1, 2)


def test_stock_holds_common_starts_of_prompts_once(look):
    scheduler = scheduler_of([3 * SIZE + 1] * 3)
    first, second, third = scheduler.running
    first.num_prompt_tokens = second.num_prompt_tokens = third.num_prompt_tokens = 90
    second.block_hashes = [*first.block_hashes[:2], "own"]
    assert shared_blocks(scheduler.running, MANAGER) == {"r0": 0, "r1": 2, "r2": 0}
    found = look(scheduler)
    assert found["pool"]["stock"] == 4 + 2 + 4 and found["stock_running"] == 3


@pytest.mark.parametrize(
    ("prompts", "computed", "taken"),
    [
        ((4 * SIZE, 4 * SIZE), (140, 140), 3),  # the last token is always computed
        ((4 * SIZE + 1, 4 * SIZE + 1), (140, 140), 4),
        ((4 * SIZE, 9 * SIZE), (300, 300), 4),  # longer than the other's prompt
        ((8 * SIZE, 8 * SIZE), (70, 300), 2),  # what the other has computed so far
    ],
)
def test_stock_takes_whole_blocks_of_a_prompt(prompts, computed, taken):
    running = [
        request(name, *sizes)
        for name, *sizes in zip("ab", computed, prompts, strict=True)
    ]
    longest = request("same", 300).block_hashes
    for each in running:
        each.block_hashes = longest[: each.num_computed_tokens // SIZE]
    assert shared_blocks(running, MANAGER) == {"a": 0, "b": taken}


def test_snapshots_come_a_few_times_a_second_and_at_the_end(heard):
    own, listener = heard
    scheduler = scheduler_of([40])
    for _ in range(5):
        own.publish(scheduler)
    assert len(listener.read()[0]) == 1
    scheduler.running, scheduler.requests = [], {}
    own.publish(scheduler)
    assert [len(each["requests"]) for each in listener.read()[0]] == [1, 0]


def test_of_very_many_requests_the_first_are_shown(look, monkeypatch):
    monkeypatch.setattr(snapshots, "MOST_ROWS", 3)
    found = look(scheduler_of([40, 40], waiting=5))
    assert [row["id"] for row in found["requests"]] == ["r0", "r1", "w0"]
    assert found["waiting"] == 5


@pytest.mark.parametrize("with_text", [True, False])
def test_tokens_are_told_up_to_the_event_where_text_is_asked_for(heard, with_text):
    own, listener = heard
    own.with_text = with_text
    event = SimpleNamespace(request_id="r", position=2)
    own.publish_tokens([event], {"r": request("r", 5)})
    records, _ = listener.read()
    assert len(records) == with_text
    for record in records:
        assert b64decode(record["ids"]) == bytes([100, 0, 0, 0, 101, 0, 0, 0])


def test_a_preemption_is_told_at_once_and_the_file_ends_with_the_engine(heard):
    own, listener = heard
    own.publish_preemption(request("r", 9))
    ((found,), _) = listener.read()
    said = found["kind"], found["request"], found["computed"]
    assert said == ("preemption", "r", 9)
    own.ring.remove()
    assert not own.ring.path.exists()
