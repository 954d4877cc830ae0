"""What decides about requests of one engine: who runs, what that will hold, limits."""

from dataclasses import dataclass, field

from vllm.v1.request import Request

from vllm_kvpolicy.block_manager.forecast import Forecast
from vllm_kvpolicy.block_manager.manager import KVPolicyManager
from vllm_kvpolicy.block_manager.planner import Planner


@dataclass
class EngineState:
    """What entry, sharing and pressure know of their engine.

    Args:
        max_model_len: most tokens of a request.
        step_tokens: most tokens that a step computes.
        late_steps: steps by which what is scheduled may be ahead of what has been
            computed, and for which a request that has ended keeps what it held: 1 with
            asynchronous scheduling.
        by_priority: vLLM schedules by priority; less urgent requests are cut first.
        watermark: superblocks that vLLM wants to be free behind one that enters.
        num_drafts: speculated tokens that a step computes at most for a request.
        window_tokens: most queries that an event reads.
        calls_events: events are called for when the pool runs short, see `pressure`.
        chunk_tokens: most of one prompt that a step computes; 0 for no limit.
        running: bounded requests that run, by id, first ones first.
        last: by request, how many of its tokens are expected to be computed.
    """

    planner: Planner
    manager: KVPolicyManager
    max_model_len: int
    step_tokens: int
    late_steps: int
    by_priority: bool = False
    watermark: int = 0
    num_drafts: int = 0
    window_tokens: int = 0
    calls_events: bool = False
    chunk_tokens: int = 0
    forecast: Forecast = field(default_factory=Forecast)
    running: dict[str, Request] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    @property
    def prompt_step(self) -> int:
        """Most tokens of one prompt that a step computes."""
        return self.chunk_tokens or self.step_tokens
