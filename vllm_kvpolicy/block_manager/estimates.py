"""vLLM's estimate of the work of a step (`--enable-mfu-metrics`) where tokens are gone.

vLLM takes a request to attend to every token that it has computed. With a policy it
attends to those that it holds.
"""

from dataclasses import replace

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.perf import ModelMetrics, PerfStats


class HeldMetrics(ModelMetrics):
    """Estimates operations and bytes by what the requests of a step hold.

    Of a sliding window that is longer than that, no more counts either.
    """

    def get_step_perf_stats_per_gpu(
        self, scheduler_output: SchedulerOutput
    ) -> PerfStats:
        """Return the estimate for a step that says what its requests have dropped."""
        cached = scheduler_output.scheduled_cached_reqs
        pairs = zip(
            cached.num_computed_tokens, scheduler_output.kv_policy_dropped, strict=True
        )
        held = [computed - dropped for computed, dropped in pairs]
        cached = replace(cached, num_computed_tokens=held)
        return super().get_step_perf_stats_per_gpu(
            replace(scheduler_output, scheduled_cached_reqs=cached)
        )
