"""Counts what running requests hold, for schedulers with a policy and for vLLM's own.

The scheduler with events extends the mixin. The classes are for servers without a
policy that serve as a baseline: `--scheduler-cls` takes COUNTING_CLASSES of compat, and
/metrics shows the counters.
"""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvpolicy.observe.metrics import CounterFile, EngineCounters
from vllm_kvpolicy.observe.shared_files import own_engine


class CountingMixin:
    """Counts superblocks and running requests of every step, and each request's peak.

    A request gives superblocks back only at an event, at the answer to one, at a
    preemption and at its end, so its peak is the most that it held just before one of
    these. With prefix caching a block of several requests counts once in a step, and
    once in the peak of each.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_policy_counters = EngineCounters(
            CounterFile(own_engine(self.vllm_config), create=True)
        )
        self._peaks_before_preemption: dict[str, int] = {}

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            pool = self.kv_cache_manager.block_pool
            # One block is vLLM's null block.
            num_held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            self.kv_policy_counters.add(
                steps=1, request_steps=len(self.running), block_steps=num_held
            )
        self._count()

    def _count(self, at_once: bool = False) -> None:
        """Let other processes see the counters, if it is time or at once."""
        if at_once or self.kv_policy_counters.is_due():
            self._note_gauges()
            self.kv_policy_counters.tell_ratio(self._held_and_computed())

    def _note_gauges(self) -> None:
        """Set the counters that others keep, just before they are told."""

    def _held_and_computed(self) -> Iterable[tuple[int, int]]:
        """Return tokens of requests with a policy."""
        return ()

    def _most_held(self, request_id: str) -> int:
        """Return the most superblocks that a request held since it was (re)started."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        return sum(
            not block.is_null
            for manager in managers
            for block in manager.req_to_blocks.get(request_id, ())
        )

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        peaks, request_id = self._peaks_before_preemption, request.request_id
        peaks[request_id] = max(peaks.get(request_id, 0), self._most_held(request_id))
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        request_id = request.request_id
        earlier = self._peaks_before_preemption.pop(request_id, 0)
        peak = max(earlier, self._most_held(request_id))
        if peak:
            more = self._ended(request_id)
            self.kv_policy_counters.add(requests=1, peak_blocks=peak, **more)
        found = super()._free_request(request, *args, **kwargs)
        self._forget(request)
        self._count(at_once=True)
        return found

    def _forget(self, request: Request) -> None:
        """Forget a request that has ended and been freed."""

    def _ended(self, request_id: str) -> dict[str, int]:
        """Return what else is counted of a request that has held something and ends."""
        return {}

    def shutdown(self) -> None:
        """Stop; the counters end with the engine."""
        super().shutdown()
        self.kv_policy_counters.file.remove()


class CountingScheduler(CountingMixin, Scheduler):
    """vLLM's synchronous scheduling, counted."""


class CountingAsyncScheduler(CountingMixin, AsyncScheduler):
    """vLLM's asynchronous scheduling, counted."""
