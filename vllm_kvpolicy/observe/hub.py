"""Gathers in an API process what all engines of its host tell, for whoever listens."""

import time
from base64 import b64decode, b64encode
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from struct import unpack
from typing import Any

import numpy as np

from vllm_kvpolicy.observe.metrics import CounterFile
from vllm_kvpolicy.observe.shared_files import LISTEN_SECONDS, RANK, SCHEDULER, Ring

POLL_SECONDS = 0.1  # between two looks at the files
RANK_SECONDS = 1.0  # that an event waits for the heads of other ranks
MOST_REQUESTS = 512  # whose last event is remembered
MOST_EVENTS = 32  # of one request that are listed
MOST_TEXTS = 32  # requests whose text is remembered
TEXT_SECONDS = 60.0  # for which it is, once they have gone
MOST_MESSAGES = 2048  # that a slow listener may be behind

Message = tuple[int, str, dict[str, Any]]  # number, name, content


class EngineReader:
    """Reads the files of one engine; see `own_engine` for its name.

    Args:
        num_ranks: that tell of heads of their own.
    """

    def __init__(self, name: str, num_ranks: int) -> None:
        self.name, self.num_ranks = name, num_ranks
        self.snapshot: dict[str, Any] | None = None
        self._counters: CounterFile | None = None
        names = [RANK.format(name, rank) for rank in range(num_ranks)]
        names.insert(0, SCHEDULER.format(name))
        self._rings: dict[str, Ring | None] = dict.fromkeys(names)
        self._next: dict[str, int] = {}
        # By serial: when it was first seen, and what ranks have told so far.
        self._events: dict[int, tuple[float, dict[int, dict[str, Any]]]] = {}
        self._told: deque[int] = deque(maxlen=256)  # serials told without some rank

    def counters(self) -> dict[str, float]:
        if self._counters is None:
            with suppress(FileNotFoundError, ValueError):
                self._counters = CounterFile(self.name, create=False)
        return {} if self._counters is None else self._counters.read()

    def poll(self) -> list[dict[str, Any]]:
        """Say that somebody listens; return what is new, events of all ranks joined."""
        found = []
        for name in self._rings:
            for record in self._read(name):
                if record["kind"] == "snapshot":
                    self.snapshot = record
                elif record["kind"] == "event":
                    if record["serial"] in self._told:
                        continue  # of a rank that is too late
                    parts = self._events.setdefault(
                        record["serial"], (time.monotonic(), {})
                    )
                    parts[1][record["place"]] = record
                else:
                    found.append(record)
        return found + self._complete()

    def _read(self, name: str) -> list[dict[str, Any]]:
        ring = self._rings[name]
        if ring is None:
            try:
                ring = self._rings[name] = Ring(name, create=False)
            except (FileNotFoundError, ValueError):  # not there yet, or still empty
                return []
        ring.listen()
        records, self._next[name] = ring.read(self._next.get(name, 0))
        return records

    def _complete(self) -> list[dict[str, Any]]:
        """Return the events of which all ranks have told, or late ones cannot."""
        now = time.monotonic()
        done = [
            serial
            for serial, (since, parts) in self._events.items()
            if len(parts) == self.num_ranks or now > since + RANK_SECONDS
        ]
        late = (s for s in done if len(self._events[s][1]) < self.num_ranks)
        self._told.extend(late)
        return [
            join([*self._events.pop(serial)[1].values()]) for serial in sorted(done)
        ]


class Hub:
    """What is known of all engines of this host, as of the last `poll`.

    Args:
        pool_blocks: superblocks of one engine's pool, until it has told.
    """

    def __init__(self, readers: Mapping[int, EngineReader], pool_blocks: int) -> None:
        self.readers, self.pool_blocks = readers, pool_blocks
        self.messages: deque[Message] = deque(maxlen=MOST_MESSAGES)
        self.num_messages = 0
        self._requests: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._polled = self._heard_since = float("-inf")

    def poll(self) -> None:
        """Say that somebody listens, and take in what is new."""
        now = time.monotonic()
        if now < self._polled + POLL_SECONDS:
            return
        if now > self._polled + LISTEN_SECONDS:
            self._heard_since = now
        self._polled = now
        for index, reader in self.readers.items():
            for record in reader.poll():
                self._take(index, record)
        self._drop_texts(now)

    def _drop_texts(self, now: float) -> None:
        """Forget the text of requests that have gone, and of all but the newest."""
        running = {row["id"] for row in self._rows()}
        texts = [known for known in self._requests.values() if "ids" in known]
        for place, known in enumerate(reversed(texts)):
            is_old = now > known["heard"] + TEXT_SECONDS and known["id"] not in running
            if is_old or place >= MOST_TEXTS:
                del known["ids"]
                known.get("last", {}).pop("share", None)

    def _take(self, engine: int, record: dict[str, Any]) -> None:
        request_id = record["request"]
        known = self._requests.setdefault(request_id, {"id": request_id, "events": []})
        self._requests.move_to_end(request_id)
        if len(self._requests) > MOST_REQUESTS:
            self._requests.popitem(last=False)
        known["engine"] = engine
        kind = record.pop("kind", "event")
        known["heard"] = time.monotonic()
        if kind == "tokens":
            known["ids"] = b64decode(record["ids"])
            return
        if kind == "event":
            known["last"] = record
            record = _short(record)
            known["events"] = [*known["events"], record][-MOST_EVENTS:]
        self.messages.append((self.num_messages, kind, {"engine": engine, **record}))
        self.num_messages += 1

    def since(self, number: int) -> list[Message]:
        """Return the messages from a number on that are still there."""
        return [message for message in self.messages if message[0] >= number]

    def is_fresh(self) -> bool:
        """Return whether all engines have told of their state, or have no request."""
        states = (self._state(*each) for each in self.readers.items())
        return all(state["fresh"] for state in states)

    def state(self) -> dict[str, Any]:
        return {"engines": [self._state(*each) for each in self.readers.items()]}

    def _state(self, index: int, reader: EngineReader) -> dict[str, Any]:
        """Return what is known of one engine.

        Its counters hold at any time. A snapshot from before somebody listened does
        not, and an engine without a step makes none; it holds no superblock then.
        """
        counters, snapshot = reader.counters(), reader.snapshot
        held = counters.get("local_blocks", 0) + counters.get("global_blocks", 0)
        is_idle = bool(counters) and not held
        is_new = snapshot is not None and snapshot["time"] >= self._heard_since
        state: dict[str, Any] = {"engine": index, "fresh": is_idle or is_new}
        state |= {"known": bool(counters), "counters": counters}
        # As of an engine without requests.
        state |= {"running": 0, "stock_running": 0, "waiting": 0, "requests": []}
        if snapshot is not None and is_new and not is_idle:
            state |= {key: snapshot[key] for key in (*state, "pool") if key in snapshot}
        elif snapshot is not None and is_new:
            state["waiting"] = snapshot["waiting"]
        total = snapshot["pool"]["total"] if snapshot else self.pool_blocks
        if is_idle or not is_new:
            cached = snapshot["pool"]["cached"] if snapshot and is_idle else 0
            pool = {
                key: counters.get(f"{key}_blocks", 0) for key in ("local", "global")
            }
            pool |= {"cached": cached, "free": total - held, "total": total, "stock": 0}
            state["pool"] = pool
        return state

    def request(self, request_id: str) -> dict[str, Any] | None:
        """Return all that is known of a request, JSON-able; None of an unknown one.

        Keys: `now`, its row in the last snapshot, None once it is gone; `last`, its
        last event, see `worker.observers.live`; `events`, the newest ones; `ids`,
        its tokens.
        """
        rows = {row["id"]: row for row in self._rows()}
        names = rows.keys() | self._requests.keys()
        if request_id not in names:
            # vLLM adds words to the id that a client has got.
            longer = [name for name in names if name.startswith(f"{request_id}-")]
            if len(longer) != 1:
                return None
            (request_id,) = longer
        known = dict(self._requests.get(request_id, {}))
        known.pop("heard", None)
        ids = known.get("ids", b"")
        known["ids"] = unpack(f"<{len(ids) // 4}i", ids)
        row = rows.get(request_id)
        return {"id": request_id, "events": [], **known, "now": row}

    def _rows(self) -> Iterator[dict[str, Any]]:
        for engine in self.state()["engines"]:
            yield from engine["requests"]


def _short(event: dict[str, Any]) -> dict[str, Any]:
    """Return the line of an event: without what there is of each head and token."""
    names = ("request", "policy", "at", "serial", "ordinal", "position", "budget")
    line = {name: event[name] for name in names}
    heads = [count for layer in event["kept"] for count in layer]
    line["held"], line["kept"] = event["held"], round(sum(heads) / len(heads), 1)
    return line


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one event of the heads that ranks with equally many have told of."""
    parts = sorted(parts, key=lambda part: part["place"])
    joined = dict(parts[0])
    for key in ("kept", "age"):
        layers = zip(*(part[key] for part in parts), strict=True)
        joined[key] = [[value for heads in each for value in heads] for each in layers]
    retention = zip(*(part["retention"] for part in parts), strict=True)
    joined["retention"] = [sum(values) / len(parts) for values in retention]
    if "share" in joined and len(parts) > 1:
        shares = [np.frombuffer(b64decode(part["share"]), np.uint8) for part in parts]
        mean = np.mean(shares, axis=0).astype(np.uint8)
        joined["share"] = b64encode(mean.tobytes()).decode()
    joined["held"] = sum(part["held"] for part in parts) / len(parts)
    joined["missing"] = joined["ranks"] - len(parts)
    del joined["place"], joined["kind"]
    return joined
