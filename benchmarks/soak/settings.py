"""The servers of a soak: a small pool, several policies, priorities."""

import json
from pathlib import Path

from benchmarks.provenance import ROOT
from benchmarks.server import EngineSettings
from benchmarks.workload import block_bytes

OURS, STOCK = "policies", "stock"
NO_POLICY = "none"
POLICIES = ("ams-tova", "adakv-snapkv", "wgkv+snapkv", "hard-snapkv", "quest")
"""All on one server; the first is the server's own."""
MODEL = ROOT / "reasoner" / "checkpoint"
GATES = ROOT / "reasoner" / "gates" / "wgkv-0.16.safetensors"
BUDGET, INTERVAL, LEAST_BUDGET, LEAST_INTERVAL = 128, 64, 72, 32
RECENT, SINKS = 32, 4
"""As the gates were trained with, and the defaults."""
MAX_TOKENS, BLOCK, POOL_BLOCKS, RUNNING = 640, 32, 48, 8
"""The pool holds two of the longest requests, where eight may run."""
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(256 * 1024)}
"""Of both servers. With a policy or without, the worker lets go of compiled code of
256 KB for every new number of tokens of a step. By default glibc takes these from its
heap, which grows by the holes that they leave; so they are mapped on their own."""


def stock_arguments(model: Path) -> list[str]:
    """Return the arguments of `vllm serve` that both servers share."""
    pool = POOL_BLOCKS * block_bytes(model, BLOCK)
    settings = EngineSettings(str(model), MAX_TOKENS, RUNNING, pool)
    return [*settings.arguments(), "--scheduling-policy", "priority"]


def policy_arguments(
    model: Path, gates: Path, events: str = "always", **options: object
) -> list[str]:
    """Return the arguments of a server that allows POLICIES.

    Args:
        gates: write gates of that model, for `wgkv`.
        events: when it drops tokens, as `--kv-events`.
    """
    config = {
        "allow": POLICIES[1:],
        "wgkv_gates": str(gates),
        "quest_budget": BUDGET // 2,
        **options,
    }
    return [
        *stock_arguments(model),
        *("--kv-policy", POLICIES[0]),
        *("--kv-budget", str(BUDGET)),
        *("--kv-interval", str(INTERVAL), "--kv-events", events),
        *("--kv-live", "--kv-policy-config", json.dumps(config)),
    ]
