"""Records as engines write them for the live routes, and an engine that tests play."""

import random
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from vllm_kvpolicy.observe.metrics import CounterFile
from vllm_kvpolicy.observe.routes import LiveRoutes
from vllm_kvpolicy.observe.shared_files import RANK, SCHEDULER, Ring

FACTS = {"policy": "ams-tova", "budget": 64, "interval": 32, "events": "always"}
FACTS |= {"model": "tiny", "block_size": 32, "capacity": "A line.", "engines": [0]}
FACTS |= {"all_engines": 1, "versions": {"vllm": "0.32.0", "vllm-kvpolicy": "0.1.0"}}
KEY = "right"  # of the server's
STEP_SECONDS, END_SECONDS = 0.1, 10.0  # of a step, and that a server may take to end


def event_record(**changed: Any) -> dict[str, Any]:
    """Return what a worker tells of an event; see
    `worker.observers.live`."""
    record: dict[str, Any] = {"kind": "event", "at": 1.5e9, "place": 0, "ranks": 1}
    record |= {"request": "r", "serial": 0, "ordinal": 0, "policy": "ams-tova"}
    record |= {"position": 100, "prompt": 60, "budget": 64, "sinks": 4, "frontier": 64}
    record |= {"held": 100.0, "kept": [[68, 68], [68, 68]]}
    record |= {"age": [[0.2, 0.3], [0.4, 0.5]], "retention": [0.5, 1.0]}
    record |= {"first_known": 0}
    return record | changed


def snapshot_record(at: float, requests: list[str]) -> dict[str, Any]:
    """Return what a scheduler tells of these requests; see `observe.snapshots`."""
    row = {"policy": "ams-tova", "running": True, "prompt": 60, "computed": 100}
    row |= {"budget": 64, "interval": 32}
    row |= {"held": 68, "blocks": 3, "events": 1, "returned": 1}
    row |= {"floor": None, "uncut": False, "pinned": 0}
    pool = {"local": 5, "global": 2, "cached": 1, "free": 23, "total": 30, "stock": 9}
    return {
        "kind": "snapshot",
        "time": at,
        "pool": pool,
        "running": len(requests),
        "stock_running": 1,
        "waiting": 0,
        "requests": [{"id": name, **row} for name in requests],
    }


class PlayedEngine:
    """Plays an engine: 28 layers, 8 heads, some requests that go on.

    Args:
        num_requests: that run.
        num_without: of the first ones, which have no events; the next one has them all.
            Tests may change it.
        most_events: that there are.

    Attributes:
        floor: of requests; None where no events are called for.
        pinned: tokens of requests that have a policy.
    """

    def __init__(
        self,
        num_requests: int,
        num_without: int = 0,
        most_events: int | None = None,
    ) -> None:
        self.counters = CounterFile("one", create=True)
        self.scheduler = Ring(SCHEDULER.format("one"), create=True)
        self.rank = Ring(RANK.format("one", 0), create=True)
        self.names = [f"cmpl-{index:03d}-{'f' * 24}" for index in range(num_requests)]
        self.counters.set("local_blocks", 5 * bool(num_requests))
        self.counters.set("global_blocks", 2 * bool(num_requests))
        self.num_steps = self.num_told = self.num_events = 0
        self.floor: int | None = None
        self.pinned = 0
        self.num_without, self._most_events = num_without, most_events
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        rng = random.Random(3)
        while not self._end.wait(STEP_SECONDS):
            self.num_steps += 1
            if not (self.names and self.scheduler.is_heard()):
                continue
            self.num_told += 1
            snapshot = snapshot_record(time.monotonic(), self.names)
            for place, row in enumerate(snapshot["requests"]):
                row["computed"] += self.num_steps
                row["events"] = int(place >= self.num_without)
                row |= {"floor": self.floor, "pinned": self.pinned}
                if not row["events"]:
                    row |= {"uncut": True, "held": row["computed"]}
            self.scheduler.append(snapshot)
            is_over = self.num_events == self._most_events
            for name in self.names[self.num_without :][: not is_over]:
                self._tell_event(name, rng)

    def _tell_event(self, name: str, rng: random.Random) -> None:
        self.num_events += 1
        kept = [[rng.randint(40, 90) for _ in range(8)] for _ in range(28)]
        retention = [rng.random() for _ in range(64)]
        changed = {"request": name, "serial": self.num_steps}
        changed |= {"share": b64encode(bytes(range(0, 250, 5)) * 2).decode()}
        changed |= {"kept": kept, "age": kept, "retention": retention}
        self.rank.append(event_record(at=time.time(), **changed))
        text = {"request": name, "ids": b64encode(bytes(400)).decode()}
        self.scheduler.append({"kind": "tokens", **text})

    def __enter__(self) -> "PlayedEngine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


@contextmanager
def serving_routes(
    port: int, token_text: Callable[[int], str] | None = None
) -> Iterator[uvicorn.Server]:
    """Serve the routes of a played engine in a thread, with `KEY`.

    The server has `END_SECONDS` to end, and is made to then, which fails the test.
    """
    live = LiveRoutes(
        facts=lambda: FACTS,
        engines=lambda: ({0: "one"}, 1),
        pool_blocks=lambda: 30,
        keys=[KEY],
        server=lambda: server,
        token_text=token_text,
    )
    app = Starlette(routes=live.routes())
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        thread.join(END_SECONDS)
        is_late, server.force_exit = thread.is_alive(), True
        thread.join()
    assert not is_late, f"not within {END_SECONDS} s"
