"""The hub joins ranks and engines, and knows what it does not know."""

from base64 import b64decode, b64encode
from types import SimpleNamespace

import pytest

from support.live import event_record, snapshot_record
from vllm_kvpolicy.observe import hub as hubs
from vllm_kvpolicy.observe.hub import EngineReader, Hub
from vllm_kvpolicy.observe.metrics import CounterFile
from vllm_kvpolicy.observe.shared_files import LISTEN_SECONDS, RANK, SCHEDULER, Ring

POOL = 40


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time that tests move."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


def hub_of(*names, ranks=1):
    return Hub({i: EngineReader(name, ranks) for i, name in enumerate(names)}, POOL)


def engine(name, ranks=1):
    """Return what an engine writes: counters, and rings of scheduler and ranks."""
    rings = [Ring(RANK.format(name, rank), create=True) for rank in range(ranks)]
    counters = CounterFile(name, create=True)
    return counters, Ring(SCHEDULER.format(name), create=True), rings


def poll(hub, clock, seconds=0.2):
    clock.now += seconds
    hub.poll()


def test_a_hub_before_its_engines_knows_the_pool(clock):
    hub = hub_of("late")
    poll(hub, clock)
    (state,) = hub.state()["engines"]
    assert state["pool"]["total"] == state["pool"]["free"] == POOL
    assert state["requests"] == [] and not state["known"] and not hub.is_fresh()
    counters, _, _ = engine("late")
    counters.add("events", 3)
    poll(hub, clock)
    (state,) = hub.state()["engines"]
    assert state["counters"]["events"] == 3 and state["known"] and hub.is_fresh()


def test_polling_tells_every_writer_that_somebody_listens(clock):
    _, scheduler, ranks = engine("one", ranks=2)
    hub = hub_of("one", ranks=2)
    assert not any(ring.is_heard() for ring in (scheduler, *ranks))
    poll(hub, clock)
    assert all(ring.is_heard() for ring in (scheduler, *ranks))
    clock.now += LISTEN_SECONDS + 1
    assert not any(ring.is_heard() for ring in (scheduler, *ranks))


def test_a_state_has_the_requests_of_all_engines(clock):
    hub = hub_of("a", "b")
    for name in ("a", "b"):
        counters, scheduler, _ = engine(name)
        counters.set("local_blocks", 5)
        poll(hub, clock)
        scheduler.append(snapshot_record(clock.now + 0.1, [f"request-{name}"]))
    poll(hub, clock)
    first, second = hub.state()["engines"]
    assert [row["id"] for row in first["requests"]] == ["request-a"]
    assert [row["id"] for row in second["requests"]] == ["request-b"]
    assert hub.is_fresh()
    assert hub.request("request-b")["now"]["id"] == "request-b"
    assert hub.request("other") is None


def test_a_snapshot_from_before_somebody_listened_is_not_shown(clock):
    counters, scheduler, _ = engine("one")
    counters.set("local_blocks", 5)
    scheduler.append(snapshot_record(clock.now, ["old"]))
    hub = hub_of("one")
    poll(hub, clock)
    (state,) = hub.state()["engines"]
    assert state["requests"] == [] and not hub.is_fresh()
    assert state["pool"]["local"] == 5  # the counters hold at any time
    scheduler.append(snapshot_record(clock.now, ["new"]))
    poll(hub, clock)
    assert hub.is_fresh() and hub.request("new") is not None
    poll(hub, clock, LISTEN_SECONDS + 1)  # nobody listened for a while
    assert not hub.is_fresh()


def test_an_engine_that_holds_nothing_has_no_requests(clock):
    counters, scheduler, _ = engine("one")
    counters.set("global_blocks", 5)
    hub = hub_of("one")
    poll(hub, clock)
    scheduler.append(snapshot_record(clock.now, ["last"]))
    poll(hub, clock)
    assert hub.request("last")
    counters.set("global_blocks", 0)
    (state,) = hub.state()["engines"]
    assert state["requests"] == [] and state["running"] == 0
    assert state["pool"]["free"] == state["pool"]["total"]


def test_text_is_forgotten_with_its_request(clock):
    counters, scheduler, ranks = engine("one")
    counters.set("local_blocks", 5)
    hub = hub_of("one")
    poll(hub, clock)
    for name in ("stays", "goes"):
        scheduler.append({"kind": "tokens", "request": name, "ids": "AQAAAA=="})
        ranks[0].append(event_record(request=name, serial=len(name), share="/w=="))
    scheduler.append(snapshot_record(clock.now + 0.1, ["stays"]))
    poll(hub, clock)
    assert hub.request("stays")["ids"] == hub.request("goes")["ids"] == (1,)
    for _ in range(40):  # a listener that stays
        poll(hub, clock, 2.0)
    assert hub.request("stays")["ids"] == (1,)
    gone = hub.request("goes")
    assert gone["ids"] == () and "share" not in gone["last"]


def test_text_of_the_newest_requests_is_kept(clock, monkeypatch):
    monkeypatch.setattr(hubs, "MOST_TEXTS", 2)
    _, scheduler, _ = engine("one")
    hub = hub_of("one")
    for name in "abc":
        scheduler.append({"kind": "tokens", "request": name, "ids": "AQAAAA=="})
    poll(hub, clock)
    assert [len(hub.request(name)["ids"]) for name in "abc"] == [0, 1, 1]


def test_a_rank_that_is_too_late_does_not_make_a_second_event(clock):
    _, _, (first, second) = engine("one", ranks=2)
    hub = hub_of("one", ranks=2)
    poll(hub, clock)
    first.append(event_record(place=0, ranks=2, kept=[[5], [6]]))
    poll(hub, clock)
    poll(hub, clock, hubs.RANK_SECONDS + 0.1)
    second.append(event_record(place=1, ranks=2))
    poll(hub, clock)
    poll(hub, clock, hubs.RANK_SECONDS + 0.1)
    last = hub.request("r")["last"]
    assert len(hub.messages) == 1 and last["missing"] == 1
    assert last["kept"] == [[5], [6]]


def test_heads_of_ranks_stand_side_by_side(clock):
    _, _, (first, second) = engine("one", ranks=2)
    hub = hub_of("one", ranks=2)
    poll(hub, clock)
    second.append(event_record(place=1, ranks=2, kept=[[7], [8]], retention=[1, 0]))
    poll(hub, clock)
    assert hub.messages == hubs.deque()  # it waits for the other rank
    first.append(event_record(place=0, ranks=2, kept=[[5], [6]], retention=[1, 1]))
    poll(hub, clock)
    last = hub.request("r")["last"]
    assert last["kept"] == [[5, 7], [6, 8]]
    assert last["retention"] == [1, 0.5] and last["missing"] == 0
    ((_, name, line),) = hub.messages
    assert (name, line["kept"], line["engine"]) == ("event", 6.5, 0)
    assert "retention" not in line


def test_shares_of_tokens_are_means_of_ranks(clock):
    _, _, rings = engine("one", ranks=2)
    hub = hub_of("one", ranks=2)
    poll(hub, clock)
    for place, share in enumerate([b"\x00\xff\x0a", b"\x00\xff\x14"]):
        text = b64encode(share).decode()
        rings[place].append(event_record(place=place, ranks=2, share=text))
    poll(hub, clock)
    assert b64decode(hub.request("r")["last"]["share"]) == b"\x00\xff\x0f"


def test_a_slow_listener_gets_what_is_left_and_requests_are_forgotten(clock):
    _, _, (ring,) = engine("one")
    hub = hub_of("one")
    for serial in range(hubs.MOST_REQUESTS + 20):
        ring.append(event_record(request=f"r{serial}", serial=serial))
        if serial % 100 == 0:
            poll(hub, clock)
    poll(hub, clock)
    assert hub.request("r0") is None and hub.request("r40") is not None
    assert hub.num_messages == hubs.MOST_REQUESTS + 20
    newest = [line["serial"] for _, _, line in hub.since(hub.num_messages - 2)]
    assert newest == [hubs.MOST_REQUESTS + 18, hubs.MOST_REQUESTS + 19]


def test_preemptions_are_messages(clock):
    _, scheduler, _ = engine("one")
    hub = hub_of("one")
    poll(hub, clock)
    scheduler.append({"kind": "preemption", "request": "r", "at": 1, "computed": 9})
    poll(hub, clock)
    ((_, name, line),) = hub.messages
    assert (name, line["request"], line["computed"]) == ("preemption", "r", 9)
