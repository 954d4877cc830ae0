"""What engines of the checks run on, and what is true of all of them on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import settle
from support.engine.helpers import Engine, Job, Run

# As fast a start as graphs allow: nothing compiled but vLLM's own kernels.
QUICK = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    },
    "kernel_config": {"enable_jit_warmup": False},
}
GPU = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 2**29,
}
LEAST_REPLAYED = 0.8
Jobs = list[Job]


@dataclass(frozen=True)
class Where:
    """What engines run on.

    Args:
        tight_blocks: of a pool that makes `jobs` preempt each other.
        backend: name of the attention backend, of engines whose decode steps are
            replays of graphs; empty where there are none.
        policies: names that are tried one beside another.
        policy_tokens: that each of them writes.
        other_backend: name of one that adds up in another order, for stock beside
            itself; empty where float32 needs no such measure.
    """

    model: Path
    settings: dict[str, Any]
    num_blocks: int
    tight_blocks: int
    jobs: Jobs
    backend: str
    policies: Sequence[str] = ()
    policy_tokens: int = 290
    other_backend: str = ""

    @property
    def dtype(self) -> str:
        """Of the model."""
        return self.settings.get("dtype", "float32")

    def engine(self, policy: dict[str, Any] | None = None) -> Engine:
        """Start an engine, stock without a policy."""
        return Engine(self.model, policy, None, self.num_blocks, **self.settings)


def storm(engine: Engine, jobs: Jobs, blocks: int) -> Run:
    """Run requests in a pool that is too small for them, until all have finished."""
    settle(engine)
    engine.admit_as_vllm_does()
    pool = engine.scheduler.kv_cache_manager.block_pool
    kept_back = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
    run = engine.run(jobs)
    settle(engine)
    pool.free_blocks(kept_back)
    engine.admit_by_forecast()
    assert run.preemptions > 0, "the pool was not too small"
    return run


class Held:
    """Follows how many blocks requests hold; given to `Engine.run`.

    Attributes:
        most: blocks of all requests together, at most.
        most_of_one: of a single request.
    """

    def __init__(self) -> None:
        self.most = self.most_of_one = 0

    def __call__(self, engine: Engine) -> None:
        """Look after a step."""
        manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        held = [
            sum(not block.is_null for block in blocks)
            for blocks in manager.req_to_blocks.values()
        ]
        self.most = max(self.most, sum(held))
        self.most_of_one = max(self.most_of_one, *held, 0)

    def tight(self) -> int:
        """Return the blocks of a pool in which each request fits, but not all do."""
        return max(self.most_of_one + 1, self.most // 2)


def assert_given_back(engine: Engine) -> None:
    """Raise unless the pool is full again and the worker has forgotten all requests."""
    settle(engine)
    assert engine.num_free == engine.num_usable, (engine.num_free, engine.num_usable)
    assert not len(engine.runtime.requests), "requests that finished still have a row"


class Graphs:
    """Counts replays of graphs of whole steps, and those that read tables of events.

    Args:
        engine: with a policy; its runner is watched from now on.
        backend: name of the attention backend; empty where there are no graphs.
    """

    def __init__(self, engine: Engine, backend: str) -> None:
        self.engine, self.backend = engine, backend
        self.replays = self.after_events = 0
        if backend:
            manager = engine.worker.model_runner.cudagraph_manager
            replay = manager.run_fullgraph

            def counted(*args: Any, **kwargs: Any) -> Any:
                self.replays += 1
                self.after_events += bool(len(engine.runtime.requests))
                return replay(*args, **kwargs)

            manager.run_fullgraph = counted

    def proof(self, steps: int, with_events: bool = True) -> list[str]:
        """Return a note of how many graphs were captured and replayed.

        Args:
            steps: of the engine since.
            with_events: requests have had events in most of them.

        Raises:
            AssertionError: the V2 runner, asynchronous scheduling, the attention
                backend or graphs are not what they should be.
        """
        engine = self.engine
        if not self.backend:
            return [f"runner {2 if engine.worker.use_v2_model_runner else 1}"]
        config = engine.llm.llm_engine.vllm_config
        captured = len(engine.worker.model_runner.cudagraph_manager.graphs)
        backend = engine.worker.kv_policy_setup.layers[0].attn_backend.get_name()
        assert engine.worker.use_v2_model_runner, "not the V2 runner"
        assert config.scheduler_config.async_scheduling, "no asynchronous scheduling"
        assert backend == self.backend, backend
        assert captured > 0, "no graph of a whole step was captured"
        assert self.replays >= LEAST_REPLAYED * steps, (
            f"{self.replays} of {steps} steps"
        )
        if with_events:
            assert self.after_events >= steps // 4, f"{self.after_events} of {steps}"
        return [f"{captured} graphs, {self.replays} replays in {steps} steps"]
