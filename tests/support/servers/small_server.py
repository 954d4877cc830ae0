"""Flags of servers of the tiny model, a request, and the series that they count."""

import re
from collections import Counter

import httpx


def flags(
    policy: str, budget: int, interval: int, **others: str | int | None
) -> list[str]:
    """Return arguments of `vllm serve` for small memory and events at fixed positions.

    Args:
        others: further flags, and other values, with _ in place of -; None for none.
    """
    values: dict[str, str | int | None] = {
        **{"kv_policy": policy, "kv_budget": budget, "kv_interval": interval},
        **{"kv_events": "always", "dtype": "float32", "served_model_name": "tiny"},
        **{"max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**23},
        **others,
    }
    words = [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in values.items()
        if value is not None
    ]
    return [word for pair in words for word in pair] + ["--enforce-eager"]


def complete(url: str, **fields: object) -> httpx.Response:
    """Send a request over a connection of its own; any API process may take it."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 300, "temperature": 0}
    body |= {"ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def by_engine(url: str, name: str) -> Counter[str]:
    """Return a series' values by the label `engine`."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    rows = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    found: Counter[str] = Counter()
    for labels, value in rows:
        (engine,) = re.findall(r'engine="(\d+)"', labels)
        found[engine] += float(value)
    return found


def num_events(url: str) -> float:
    return by_engine(url, "kvpolicy_events_total").total()
