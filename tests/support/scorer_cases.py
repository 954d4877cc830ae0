"""Scorers as tests run them: each with its defaults, then with options that take it
through code that events as short as those of `event_inputs` would not reach."""

from typing import Any

from vllm_kvpolicy.policies.names import SCORERS

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("snapmax", {"snapmax_window": 16}),
    ("lagkv", {"lag": 16}),
    ("lagkv", {"lag": 16, "cross": True}),
    ("expected", {"covariance": False, "value_norm": False}),
    ("epikv", {"variant": "variance"}),
    ("epikv", {"variant": "band"}),
    ("epikv", {"variant": "kv-key"}),
    ("epikv", {"variant": "kv-val"}),
    ("epikv", {"variant": "lag-kv", "epikv_chunk": 16}),
    ("epikv", {"variant": "segment", "epikv_chunk": 16}),
    ("triattention", {"tri_aggregate": "mean"}),
)
CASES = tuple((name, {}) for name in SCORERS) + VARIANTS
# A mean over all heads of a layer goes by cache index: heads read each other.
READ_ALL_HEADS = (("tova", {}), ("rpc", {}), VARIANTS[8])


def case_id(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "default"
    return str(value)
