"""Records as engines write them for the live routes."""

from typing import Any


def event_record(**changed: Any) -> dict[str, Any]:
    """Return what a worker tells of an event; see `worker.live`."""
    record: dict[str, Any] = {
        "kind": "event",
        "at": 1.5e9,
        "place": 0,
        "ranks": 1,
        "request": "r",
        "serial": 0,
        "ordinal": 0,
        "policy": "ams-tova",
        "position": 100,
        "prompt": 60,
        "budget": 64,
        "sinks": 4,
        "frontier": 64,
        "held": 100.0,
        "kept": [[68, 68], [68, 68]],
        "age": [[0.2, 0.3], [0.4, 0.5]],
        "retention": [0.5, 1.0],
        "first_known": 0,
    }
    return record | changed


def snapshot_record(at: float, requests: list[str]) -> dict[str, Any]:
    """Return what a scheduler tells of these requests; see `live.snapshots`.

    Args:
        at: time of this host's clock.
        requests: ids.
    """
    row = {"policy": "ams-tova", "running": True, "prompt": 60, "computed": 100}
    row |= {"held": 68, "blocks": 3, "events": 1, "returned": 1}
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
