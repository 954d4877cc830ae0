"""Bounded, well-chosen KV caches for vLLM: `vllm serve MODEL --kv-policy NAME`.

Words: a *superblock* is vLLM's KV block; a *head page* its part of one layer and KV
head; *keep* is what a policy does to tokens; an *event* re-selects one request's
survivors at position p and moves its *frontier* F, above which tokens are *local*
(dense, in their stock place) and below which only survivors are left (*global*);
*budget* K, *interval* I, *recent* R and *sinks* S count tokens per KV head.

Main path: plugin -> patch (cli, config, guards) -> scheduler -> block_manager.planner
-> block_manager.manager -> worker -> worker.runtime -> policies -> kernels.
"""

from typing import Any

__all__ = ["LLM", "KVPolicyConfig"]


def __getattr__(name: str) -> Any:
    """Import `LLM` and `KVPolicyConfig` when they are first asked for."""
    from importlib import import_module

    homes = {"LLM": "llm", "KVPolicyConfig": "config"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
