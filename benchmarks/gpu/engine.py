"""Owns one engine: starts it in this process, steps it, and times what it does.

No HTTP and no text: prompts are token ids, weights are drawn.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.models import drawn_weights, token_bytes, weight_bytes, write_model
from benchmarks.gpu.timing import Spans, watched
from benchmarks.load import Completion
from benchmarks.stats import latencies
from benchmarks.workload import Workload
from vllm_kvpolicy.config_keys import ALWAYS

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ON_A_CPU = {"enforce_eager": True, "block_size": 32}
SETTLE_STEPS = 8
SETTLED_TOKENS = 4
OVERHEAD_BYTES = 7 * 2**29
"""Of an engine beside weights and pool: CUDA's own, graphs, a step's activations."""
COUNTERS = (
    "events",
    "blocks_returned",
    "tokens_kept",
    "tokens_dropped",
    "event_seconds",
)
KERNEL_SHARE = 2e-3
"""Kernels below this share of a profile are left out of the record."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine of a comparison.

    Args:
        pool_tokens: tokens of an unquantised KV cache that its pool has bytes for.
        policy: the plain form of the policy's configuration; None for stock vLLM.
    """

    name: str
    model: str
    folder: Path
    pool_tokens: int
    max_model_len: int
    max_num_seqs: int
    policy: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def value_bytes(self) -> int:
        """Bytes of a number in an unquantised KV cache."""
        return 2 if torch.cuda.is_available() else 4

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, with what a policy holds beside it."""
        return self.pool_tokens * token_bytes(self.model, self.value_bytes)

    @property
    def needed_bytes(self) -> int:
        """Bytes of a GPU that the engine takes, about."""
        return weight_bytes(self.model) + self.pool_bytes + OVERHEAD_BYTES

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's LLM; all else is vLLM's default."""
        on_gpu = torch.cuda.is_available()
        policy = None if self.policy is None else {"events": ALWAYS, **self.policy}
        return {
            "model": str(write_model(self.model, self.folder / self.model)),
            "skip_tokenizer_init": True,
            "load_format": drawn_weights(),
            "dtype": "bfloat16" if on_gpu else "float32",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            # Engines share the GPU; their pools are given in bytes.
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": self.pool_bytes,
            "additional_config": {} if policy is None else {"kv_policy": policy},
            "seed": 0,
            **({} if on_gpu else ON_A_CPU),
            **self.settings,
        }


class BenchEngine:
    """A vLLM engine in this process."""

    def __init__(self, spec: EngineSpec) -> None:
        arguments = spec.arguments()
        from vllm import LLM

        self.spec = spec
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.worker = self.core.model_executor.driver_worker.worker
        self.device = torch.device(self.worker.device)
        self.setup = getattr(self.worker, "kv_policy_setup", None)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._preemptions = 0
        self._count_preemptions()

    def describe(self) -> dict[str, Any]:
        """Return what vLLM made of the arguments."""
        config = self.engine.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.attn_backend.get_name() for layer in layers}
        return {
            "policy": None if self.spec.policy is None else dict(self.spec.policy),
            "pool_bytes": self.spec.pool_bytes,
            "blocks": self.pool.num_gpu_blocks,
            "block_tokens": config.cache_config.block_size,
            "block_bytes": self.block_bytes,
            "cache_dtype": str(config.cache_config.cache_dtype),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "v2_runner": bool(self.worker.use_v2_model_runner),
            "graphs": config.compilation_config.cudagraph_mode.name,
            "backends": sorted(backends),
            "side_bytes": 0 if self.setup is None else self.setup.early_bytes,
        }

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        config = self.scheduler.kv_cache_config
        return sum(each.size for each in config.kv_cache_tensors) // config.num_blocks

    def _count_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def counters(self) -> dict[str, float]:
        """Return the policy's own counters; zeros without a policy."""
        if self.setup is None:
            return dict.fromkeys(COUNTERS, 0.0)
        return self.scheduler.kv_policy_counters.read()

    # -- what the parts ask for ----------------------------------------------------

    def round(
        self,
        workload: Workload,
        number: int,
        extra: dict[str, Any] | None = None,
        limit_s: float = 600.0,
        watch: bool = False,
        share: float = 1.0,
    ) -> dict[str, Any]:
        """Run all requests of a workload at once and return what it took.

        Args:
            number: chooses the contents of prompts.
            limit_s: seconds after which what is left is aborted; the result then says
                `complete: False` and its figures are those of the time until then.
            watch: time operations and events; returned as `spans_ms`.
            share: of the pool's blocks; the others are held back.

        Returns:
            The columns of stats.latencies; peak_running, mean_running (over time),
            preemptions, steps, COUNTERS; and as raw samples ttft_s per request, step_ms
            and running per step.
        """
        spans = Spans(self.device)
        before, preempted = self.counters(), self._preemptions
        with self._only(share), watched(spans) if watch else nullcontext():
            prompts = workload.prompts(number)
            live = Requests(self, prompts, workload.output_tokens, extra)
            is_complete = live.step_while(lambda: True, limit_s)
            live.abort()
        after = self.counters()
        begun = [each for each in live.completions if len(each.arrivals) > 1]
        result: dict[str, Any] = latencies(begun) | {
            "complete": is_complete,
            "requests_begun": len(begun),
            "peak_running": max(live.running),
            "mean_running": live.mean_running(),
            "preemptions": self._preemptions - preempted,
            "steps": len(live.step_ms),
            **{name: after[name] - before[name] for name in COUNTERS},
            "ttft_s": [round(c.arrivals[0] - c.started, 4) for c in begun],
            "step_ms": [round(each, 3) for each in live.step_ms],
            "running": live.running,
        }
        if watch:
            result["spans_ms"] = spans.milliseconds()
        return result

    def decode(
        self, workload: Workload, number: int, steps: int, profiled: int
    ) -> dict[str, Any]:
        """Time steps in which every request of a workload decodes one token.

        Args:
            workload: the requests; their output must be longer than both spans.
            profiled: further steps, to time kernel by kernel; only on a GPU.

        Returns:
            `step_ms` of each step and `median_ms`; `held_tokens`: of all requests, in
            the middle of the timed steps; `prefill_s`; `kernels_ms`: per kernel, of a
            step, those that matter.
        """
        start = time.perf_counter()
        live = Requests(self, workload.prompts(number), workload.output_tokens)
        live.step_while(lambda: live.fewest_tokens() < SETTLED_TOKENS)
        prefill = time.perf_counter() - start
        first = len(live.step_ms)
        live.step_while(lambda: len(live.step_ms) < first + steps // 2)
        held = self.held_tokens()
        live.step_while(lambda: len(live.step_ms) < first + steps)
        step_ms = live.step_ms[first:]
        kernels = {}
        if self.device.type == "cuda" and profiled:
            kernels = self._profile(live, profiled)
        fewest, running = live.fewest_tokens(), live.running[-1]
        live.abort()
        if running != len(live.completions) or fewest < steps:
            raise RuntimeError(f"only {running} requests decoded in the timed steps")
        return {
            "median_ms": median(step_ms),
            "held_tokens": held,
            "prefill_s": round(prefill, 3),
            "step_ms": [round(each, 4) for each in step_ms],
            "kernels_ms": kernels,
        }

    def send(
        self,
        name: str,
        prompt: list[int],
        output_tokens: int,
        extra: dict[str, Any] | None,
    ) -> None:
        """Send a request that decodes greedily and does not stop early."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)

    # -- inside ---------------------------------------------------------------------

    @contextmanager
    def _only(self, share: float) -> Iterator[None]:
        # As many bytes of every engine: what a policy holds beside is not scaled.
        pool, whole = self.pool, self.spec.pool_bytes // self.block_bytes
        kept_back = pool.get_new_blocks(whole - int(share * whole))
        pool.num_gpu_blocks -= len(kept_back)  # what a scheduler reckons with
        try:
            yield
        finally:
            pool.num_gpu_blocks += len(kept_back)
            pool.free_blocks(kept_back)

    def _profile(self, live: "Requests", steps: int) -> dict[str, float]:
        from torch.profiler import ProfilerActivity, profile

        last = len(live.step_ms) + steps
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            live.step_while(lambda: len(live.step_ms) < last)
            torch.cuda.synchronize(self.device)
        times = {
            each.key[:160]: each.self_device_time_total / 1e3 / steps
            for each in found.key_averages()
        }
        least = KERNEL_SHARE * sum(times.values())
        return {name: value for name, value in times.items() if value >= least}

    def held_tokens(self) -> int:
        """Return the tokens that live requests hold per KV head."""
        planner = getattr(self.scheduler, "kv_policy_planner", None)
        states = {} if planner is None else planner.states
        return sum(
            request.num_computed_tokens
            - (states[name].dropped_tokens if name in states else 0)
            for name, request in self.scheduler.requests.items()
        )

    def close(self) -> None:
        """Shut the engine down."""
        self.engine.engine_core.shutdown()


def settle(engine: Any) -> None:
    """Run the empty steps in which the worker hears which requests finished.

    Args:
        engine: has `scheduler` and `core`, vLLM's.
    """
    for _ in range(SETTLE_STEPS):
        if engine.scheduler.has_requests() or engine.core.batch_queue:
            engine.core.step_fn()


class Requests:
    """Requests that are sent at once, and when their tokens came.

    Args:
        output_tokens: of each, forced.

    Attributes:
        completions: one per request.
        step_ms: how long each engine step took.
        running: requests in the batch after each step.
    """

    def __init__(
        self,
        bench: BenchEngine,
        prompts: Sequence[Sequence[int]],
        output_tokens: int,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.bench = bench
        self.step_ms: list[float] = []
        self.running: list[int] = []
        self._last = time.perf_counter()
        self.completions = [Completion(started=self._last) for _ in prompts]
        for number, prompt in enumerate(prompts):
            bench.send(str(number), list(prompt), output_tokens, extra)

    def fewest_tokens(self) -> int:
        """Return how many tokens the slowest request has."""
        return min(len(each.token_ids) for each in self.completions)

    def mean_running(self) -> float:
        """Return the requests in the batch, averaged over time."""
        return float(np.average(self.running, weights=self.step_ms))

    def step_while(self, goes_on: Callable[[], bool], limit_s: float = 600.0) -> bool:
        """Step the engine; return whether the time was enough.

        Args:
            goes_on: asked before each step; steps end with the last request, too.
        """
        engine = self.bench.engine
        end = time.perf_counter() + limit_s
        while engine.has_unfinished_requests() and goes_on():
            if time.perf_counter() > end:
                return False
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                completion = self.completions[int(output.request_id)]
                tokens = output.outputs[0].token_ids
                completion.token_ids += tokens
                completion.arrivals += [now] * len(tokens)
                completion.finish_reason = output.outputs[0].finish_reason
            self.step_ms.append(1e3 * (now - self._last))
            self.running.append(len(self.bench.scheduler.running))
            self._last = now
        return True

    def abort(self) -> None:
        """End what still runs, and wait until its blocks are back."""
        left = [
            str(number)
            for number, each in enumerate(self.completions)
            if each.finish_reason is None
        ]
        if left:
            self.bench.engine.abort_request(left)
        settle(self.bench)
