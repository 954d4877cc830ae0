"""Real VllmConfigs of the tiny model, and a way to change one without rebuilding it."""

from pathlib import Path
from typing import Any

KV_BYTES = 8 * 1024**2


def engine_args(model: Path, **changes: Any) -> Any:
    """Return EngineArgs of the tiny model; `changes` are further fields."""
    from vllm.engine.arg_utils import EngineArgs

    fields = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 4096,
        "kv_cache_memory_bytes": KV_BYTES,
        "enforce_eager": True,
    }
    return EngineArgs(**{**fields, **changes})


class Overlay:
    """Reads like another object, with some attributes replaced.

    Args:
        base: the object behind it.
        changes: dotted attribute paths and their values; each must exist in `base`.
    """

    def __init__(self, base: Any, changes: dict[str, Any]) -> None:
        self._base = base
        self._values = {}
        self._nested: dict[str, dict[str, Any]] = {}
        for path, value in changes.items():
            name, _, rest = path.partition(".")
            if not hasattr(base, name):
                raise AttributeError(f"{type(base).__name__} has no {name}")
            if rest:
                self._nested.setdefault(name, {})[rest] = value
            else:
                self._values[name] = value

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        value = getattr(self._base, name)
        return Overlay(value, self._nested[name]) if name in self._nested else value
