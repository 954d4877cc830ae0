"""Runs vLLM's own tests with our classes in the place of vLLM's: see `__main__`."""

from typing import Any

from vllm_kvpolicy.config_keys import ALWAYS

STOCK = "stock"
SMALL = {"events": ALWAYS, "budget": 64, "interval": 32}
MODES: dict[str, dict[str, Any]] = {
    STOCK: {},
    "never": {"policy": "ams-tova", "budget": 2**20},
    "small": {"policy": "tova", **SMALL, "recent": 16},
    "identity": {"policy": "identity", **SMALL, "recent": 0},
}
"""By mode, the plain form of the policy: none, one whose budget never binds, one whose
budget binds soon, and one whose events move everything and drop nothing."""
LEAST = {"budget": 32, "interval": 1, "recent": 0, "sinks": 0}
"""The least that a policy can have with superblocks of 32 tokens: of servers, whose
tests ask for a line or two, in the place of what a mode with events says."""
