"""Owns engines that only seem to run, for a rehearsal of the benchmark without a GPU.

What asks them, measures and prints is what asks real ones; only vLLM is missing. Every
request gets its tokens in steps that take no time, so that no figure means anything.
"""

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.engine import COUNTERS, BenchEngine, EngineSpec
from benchmarks.gpu.models import token_bytes
from benchmarks.gpu.timing import EVENT, PHASES, Spans

BLOCK_TOKENS = 16
MOST_STEPS = 256
KERNELS_MS = {"flash_fwd (rehearsed)": 0.5, "reshape_and_cache (rehearsed)": 0.1}


class Pool:
    """Counts blocks as vLLM's pool does."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self._free = num_blocks - 1

    def get_num_free_blocks(self) -> int:
        """Return how many are free."""
        return self._free

    def get_new_blocks(self, count: int) -> int:
        """Take some."""
        self._free -= count
        return count

    def free_blocks(self, count: int) -> None:
        """Give some back."""
        self._free += count


class Steps:
    """Requests that all take part in each step, in at most MOST_STEPS of them."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.each: dict[str, int] = {}

    def has_unfinished_requests(self) -> bool:
        """Return whether one has tokens left."""
        return bool(self.left)

    def step(self) -> list[Any]:
        """Give each request its next tokens."""
        outputs = []
        for name in list(self.left):
            count = min(self.each[name], self.left[name])
            self.left[name] -= count
            is_last = not self.left[name]
            if is_last:
                del self.left[name]
            tokens = SimpleNamespace(
                token_ids=[1] * count, finish_reason="length" if is_last else None
            )
            outputs.append(SimpleNamespace(request_id=name, outputs=[tokens]))
        return outputs

    def abort_request(self, names: list[str]) -> None:
        """Forget requests."""
        for name in names:
            self.left.pop(name, None)


class RehearsedEngine(BenchEngine):
    """A `BenchEngine` without vLLM.

    Args:
        spec: what would be started.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.device = torch.device("cpu")
        self.engine: Any = Steps()
        self.setup = spec.policy and SimpleNamespace(
            early_bytes=0,
            side_tables=SimpleNamespace(pool_blocks=lambda room, block: room // block),
        )
        self.pool = Pool(spec.pool_bytes // self.block_bytes)
        self._preemptions = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        quantised = self.spec.settings.get("kv_cache_dtype") == "fp8"
        value_bytes = 1 if quantised else self.spec.value_bytes
        return BLOCK_TOKENS * token_bytes(self.spec.model, value_bytes)

    @property
    def scheduler(self) -> Any:
        """Who runs."""
        return SimpleNamespace(running=list(self.engine.left))

    def describe(self) -> dict[str, Any]:
        """Return the facts that tables read."""
        return {
            "policy": None if self.spec.policy is None else dict(self.spec.policy),
            "pool_bytes": self.spec.pool_bytes,
            "blocks": self.pool.num_gpu_blocks,
            "cache_dtype": self.spec.settings.get("kv_cache_dtype", "auto"),
            "backends": ["rehearsed"],
        }

    def counters(self) -> dict[str, float]:
        """Return counters that stand still."""
        return dict.fromkeys(COUNTERS, 0.0)

    def send(
        self,
        name: str,
        prompt: list[int],
        output_tokens: int,
        extra: dict[str, Any] | None,
    ) -> None:
        """Note a request; the longest of what fits into `max_model_len` is allowed.

        Raises:
            ValueError: vLLM would refuse it.
        """
        if len(prompt) + output_tokens > self.spec.max_model_len:
            raise ValueError(
                f"request: got {len(prompt)} + {output_tokens} tokens, "
                f"expected at most {self.spec.max_model_len}"
            )
        self.engine.left[name] = output_tokens
        self.engine.each[name] = -(-output_tokens // MOST_STEPS)

    def round(self, *args: Any, watch: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Run a round; where operations are watched, each of them was seen once."""
        result = super().round(*args, **kwargs)
        if watch:
            result["phases_ms"] = seen_once(self.device)
        return result

    def decode(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Time steps, of which a profile would show some kernels."""
        return super().decode(*args, **kwargs) | {"kernels_ms": dict(KERNELS_MS)}

    def held_tokens(self) -> int:
        """Return as many tokens as the requests have left."""
        return sum(self.engine.left.values())

    def settle(self) -> None:
        """Do nothing: no worker has to hear of anything."""

    def close(self) -> None:
        """Do nothing."""


def seen_once(device: torch.device) -> dict[str, list[float]]:
    """Return the spans of one event in which every operation ran once."""
    spans = Spans(device)
    with spans.span(EVENT):
        for phase in PHASES.values():
            with spans.span(phase):
                pass
    return spans.milliseconds()


class RehearsedProcess:
    """Stands in for `process.EngineProcess`, with a `RehearsedEngine`.

    Args:
        spec: what would be started.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.engine = spec, RehearsedEngine(spec)

    def wait_ready(self) -> dict[str, Any]:
        """Return `BenchEngine.describe`."""
        return self.engine.describe()

    def call(self, method: str, **arguments: Any) -> Any:
        """Return what a method of BenchEngine returns."""
        return getattr(self.engine, method)(**arguments)

    def close(self) -> None:
        """End it."""
        self.engine.close()
