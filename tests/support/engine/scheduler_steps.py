"""Steps of a real scheduler that no worker computes."""

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


def sampled(request: Request, token: int = 5) -> list[int]:
    """Return a request's next token, if all that it has are computed."""
    return [token] * (request.num_computed_tokens >= request.num_tokens)


def run_step(
    scheduler: Any, sample: Callable[[Request], list[int]] = sampled
) -> SchedulerOutput:
    """Schedule a step, and give requests the tokens that it samples for them."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    tokens = [sample(scheduler.requests[name]) for name in names]
    index = {name: number for number, name in enumerate(names)}
    result = ModelRunnerOutput(names, index, sampled_token_ids=tokens)
    scheduler.update_from_output(output, result)
    return output
