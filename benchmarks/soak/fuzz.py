"""Draws malformed requests for every POST endpoint of a server."""

import json
import random
from collections.abc import Mapping
from typing import Any

from benchmarks.soak.asks import Ask
from benchmarks.soak.promises import FUZZ, Ledger
from benchmarks.soak.storm import Outcome

OUR_KEYS = ("kv_policy", "kv_budget", "kv_interval", "kv_recent", "kv_sinks", "kv_x")
CHANGES_THE_SERVER = {"/scale_elastic_ep"}
"""Endpoints that are not asked: they restart engines, which no client may."""
KIND = "fuzz"
TOKENS = 8
PATIENCE = 20.0
"""Seconds after which the client of a malformed request leaves."""
ATOMS: tuple[Any, ...] = (
    *(None, True, False, -(2**63), -1, 0, 1, 3, 2**63, 0.5, -1e308, 1e308),
    *("", "none", "ams-tova", "\x00", "\ud7ff\n", "x" * 3000, "128", [], {}),
)


def draw(
    seed: int, wave: int, count: int, openapi: Mapping[str, Any], has_policy: bool
) -> list[Ask]:
    """Return malformed requests."""
    rng = random.Random(f"{seed}/fuzz/{wave}")
    paths = sorted(
        path
        for path, verbs in openapi["paths"].items()
        if "post" in verbs and path not in CHANGES_THE_SERVER
    )
    drawn = [_draw_one(rng, rng.choice(paths), openapi) for _ in range(count)]
    return drawn if has_policy else [ask.without_knobs() for ask in drawn]


def _draw_one(rng: random.Random, path: str, openapi: Mapping[str, Any]) -> Ask:
    """Return a body that would do, with some of its keys replaced, or any value."""
    place = path.replace("{response_id}", rng.choice(("resp_1", "%00", "..")))
    if rng.random() < 0.1:
        return Ask(KIND, place, _value(rng, 2), leaves=PATIENCE)
    body: dict[str, Any] = {
        "model": "model",
        "prompt": "hello",
        "input": "hello",
        "messages": [{"role": "user", "content": "hello"}],
        "tokens": [10, 11],
        "max_tokens": TOKENS,
        "max_output_tokens": 16,
    }
    keys = sorted(_properties(openapi, path)) or sorted(body)
    for key in rng.sample(keys, min(len(keys), rng.randint(0, 2))):
        body[key] = _value(rng, 2)
    if rng.random() < 0.6:
        xargs = {rng.choice(OUR_KEYS): _value(rng, 2) for _ in range(rng.randint(1, 2))}
        body["vllm_xargs"] = rng.choice((xargs, xargs, _value(rng, 1)))
    return Ask(KIND, place, body, leaves=PATIENCE)


def _properties(openapi: Mapping[str, Any], path: str) -> set[str]:
    """Return the keys that the schemas of an endpoint's body name."""
    body = openapi["paths"][path]["post"].get("requestBody", {})
    names = {word.rpartition("/")[2] for word in _references(body)}
    schemas = openapi.get("components", {}).get("schemas", {})
    return {key for name in names for key in schemas[name].get("properties", ())}


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [word for each in value.values() for word in _references(each)]
    if isinstance(value, list):
        return [word for each in value for word in _references(each)]
    return []


def _value(rng: random.Random, depth: int) -> Any:
    """Return any JSON value, nested at most `depth` times."""
    if depth == 0 or rng.random() < 0.7:
        return rng.choice(ATOMS)
    if rng.random() < 0.5:
        return [_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    keys = rng.sample(("a", "json", "type", "text", "content", *OUR_KEYS), 2)
    return {key: _value(rng, depth - 1) for key in keys}


def check(ask: Ask, ours: Outcome, stock: Outcome | None, ledger: Ledger) -> None:
    """Check what a malformed request got.

    Args:
        ours: what it got from the server with policies.
        stock: what stock answers without keys of ours; None if that was not asked.

    Raises:
        BrokenPromise: the server failed where stock does not.
    """
    said = f"{ask.path} {json.dumps(ask.body)[:800]} got {ours.status} "
    said += str(ours.payload)[:400]
    as_bad = stock is not None and has_failed(stock)
    ledger.check(FUZZ, not has_failed(ours) or as_bad, said)


def has_failed(outcome: Outcome) -> bool:
    """Return whether the server failed: HTTP 5xx, or a connection that broke."""
    return outcome.status is not None and not 100 <= outcome.status < 500
