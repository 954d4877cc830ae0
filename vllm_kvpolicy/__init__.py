"""Bounded, well-chosen KV caches for vLLM: `vllm serve MODEL --kv-policy NAME`.

Words: a *superblock* is vLLM's KV block of N tokens; a *head page* is its part of one
layer and KV head; a *slot*, page * N + offset, is the place of one token; an *event*
decides at position p which tokens of a request stay, and moves its *frontier* F; a
token is *kept* if it stays in the cache after an event, else it is *dropped*; tokens at
and above F are *local* (dense, in their stock place); a *survivor* is a kept token
below F, and survivors are all that is left there (*global*); a *row* is a request's
place in the worker's tables; *budget* K, *interval* I, *recent* R and *sinks* S count
tokens per KV head.

Main path of one request from the flag to the kernels, in the order of first calls:

  flag      plugin > api.patch > api.cli > api.engine_config > config
  refuse    api.engine_config > api.guards
  worker    api.engines > worker.worker > worker.setup > policies.compose
  request   api.patch > api.request_guards
  schedule  block_manager.scheduler > block_manager.planner > block_manager.manager
  enter     block_manager.entry > block_manager.forecast
  step      worker.runtime > worker.request_table > worker.backends.mixins
  capture   worker.captures.query_windows > kernels
  free      block_manager.manager > block_manager.other_groups
  event     worker.compaction > worker.survivors > policies.compose
  usage     policies.compose > kernels.window_usage
  decide    policies.scorers.tova > policies.allocators.ams > kernels.segment_quota
  move      worker.compaction > kernels.compact_pages
  attend    worker.tiers.equal > kernels.page_tables

(`tests/test_main_path.py` walks it with `ams-tova`.)
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
