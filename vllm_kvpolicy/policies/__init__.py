"""Policies: which tokens a KV head keeps, as pure functions of tensors.

Without an engine, `score` returns the scores of plain tensors (`policies.scoring`), and
`allocators.ams.select` the selection of AMS.
"""

from typing import Any

__all__ = ["score"]


def __getattr__(name: str) -> Any:
    """Import `score`, and torch with it, when it is first asked for."""
    from importlib import import_module

    if name != "score":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.scoring").score
