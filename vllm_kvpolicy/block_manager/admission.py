"""Lets requests in as far as the pool bears them until they end, and keeps them going.

vLLM admits a request when its prompt fits and preempts one when the pool is full. What
bounded requests will hold is known, so that both can be foreseen:

* a waiting request enters when the forecast with it stays within the pool;
* a running one sits a step out where it would take the last superblocks with which
  somebody gets to the next event. So nobody need be preempted, even where requests do
  not run in every step as the forecast supposes.

Requests without a bound (`kv_policy` "none", and policies that may keep everything)
follow vLLM's rule; what they hold now counts as if they held it for ever.
"""

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.request import Request, RequestStatus

from vllm_kvpolicy.block_manager.forecast import HORIZON, Forecast, held_levels
from vllm_kvpolicy.block_manager.manager import KVPolicyManager
from vllm_kvpolicy.block_manager.output_lengths import OutputLengths
from vllm_kvpolicy.block_manager.planner import Planner, RequestState


@dataclass
class Admission:
    """Decides who enters and who waits, for one engine.

    Args:
        planner: knows where requests are and when they have events.
        manager: knows what they hold.
        max_model_len: longest request, in tokens.
        late_steps: steps for which a request that has ended keeps what it held: 1 with
            asynchronous scheduling.

    Attributes:
        forecast: what requests that have entered will hold.
        lengths: of the answers so far.
        num_held_back: steps in which a waiting request could not enter.
        num_waits: steps that running requests sat out for others.
    """

    planner: Planner
    manager: KVPolicyManager
    max_model_len: int
    late_steps: int
    forecast: Forecast = field(default_factory=Forecast)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    num_held_back: int = 0
    num_waits: int = 0
    # By request, superblocks of its cached prefix that others held when it entered.
    _shared: dict[str, int] = field(default_factory=dict)
    # By request, how many of its tokens are expected to be computed.
    _last: dict[str, int] = field(default_factory=dict)
    _entered: list[str] = field(default_factory=list)

    # -- the life of a request ----------------------------------------------------

    def note_shared(self, request_id: str, num_blocks: int) -> None:
        """Note how much of a waiting request's cached prefix others hold already."""
        self._shared[request_id] = num_blocks

    def admits(self, request: Request, computed: int, num_new: int) -> bool:
        """Return whether a waiting request may enter in this step.

        Args:
            request: the request.
            computed: its tokens that the prefix cache gives it.
            num_new: tokens that it would compute in this step.
        """
        request_id, state = request.request_id, self._bounded(request.request_id)
        if state is None:
            return True
        levels, offset = self._levels(request, state, computed, num_new)
        if not (self._is_empty() or self._fits(levels)):
            self.num_held_back += 1
            return False
        self.forecast.book(request_id, levels, offset)
        self._entered.append(request_id)
        return True

    def follow(self, request: Request, computed: int, num_new: int) -> None:
        """Book a running request anew where it is not where it was expected.

        Args:
            request: the request.
            computed: its tokens computed before this step.
            num_new: tokens that it would compute in this step.
        """
        booking = self.forecast.bookings.get(request.request_id)
        if booking is None:
            return
        step = self.forecast.step
        if booking.offset is None:
            as_expected = computed + num_new < request.num_tokens
        else:
            as_expected = computed - step == booking.offset
        if as_expected and step < booking.end:
            return
        state = self.planner.states[request.request_id]
        levels, offset = self._levels(request, state, computed, num_new)
        self.forecast.book(request.request_id, levels, offset)

    def leave(self, request: Request) -> None:
        """Forget a request that has been preempted or has ended; learn from the end."""
        self.forecast.cancel(request.request_id)
        self._shared.pop(request.request_id, None)
        self._last.pop(request.request_id, None)
        if RequestStatus.is_finished(request.status) and _may_stop(request):
            stopped = request.status != RequestStatus.FINISHED_LENGTH_CAPPED
            self.lengths.add(request.num_output_tokens, stopped)

    def finish_step(self, scheduled: Container[str]) -> None:
        """Go on to the next step; forget who was let in and found no superblock."""
        for request_id in self._entered:
            if request_id not in scheduled:
                self.forecast.cancel(request_id)
        self._entered.clear()
        self.forecast.step += 1

    # -- who may enter ------------------------------------------------------------

    def _is_empty(self) -> bool:
        return not self.forecast.bookings and not self.manager.num_taken

    def _fits(self, levels: np.ndarray) -> bool:
        """Return whether the pool bears one more request, now and while it runs."""
        if self.forecast.peak(levels) > self.manager.num_usable - self._unforeseen():
            return False
        left = self.manager.num_free - int(levels[0])
        return left >= levels.max() - levels[0] or self._somebody_proceeds(left)

    def _unforeseen(self) -> int:
        """Return the superblocks held that no booking accounts for."""
        foreseen = sum(
            self.manager.num_held(request_id) - self._discount(request_id)
            for request_id in self.forecast.bookings
        )
        return max(self.manager.num_taken - foreseen, 0)

    def _discount(self, request_id: str) -> int:
        """Return how many superblocks of a request are accounted for by others."""
        has_events = self.planner.states[request_id].ordinal
        return 0 if has_events else self._shared.get(request_id, 0)

    def _levels(
        self, request: Request, state: RequestState, computed: int, num_new: int
    ) -> tuple[np.ndarray, int | None]:
        """Return what a request will hold from this step on, and its offset.

        While it computes a prompt in several steps, which depends on others, that is
        its peak.
        """
        footprint, end = state.footprint, computed + num_new
        known = request.num_tokens + request.num_output_placeholders
        last = max(self._expected_tokens(request), end)
        self._last[request.request_id] = last
        shared = self._shared.get(request.request_id, 0)
        if end < known:
            num_steps = -(-(known - computed) // num_new) + last - known
            peak = footprint.peak_blocks(last, shared)
            return np.full(min(num_steps, HORIZON), peak), None
        stop = min(last, end + HORIZON)
        now = [held_levels(footprint, at, at + 1) for at in (computed, end - 1)]
        later = held_levels(footprint, end, stop)
        levels = np.concatenate([np.maximum(*now), later])
        num_before = max(state.plan.first_event - end + 1, 0)
        levels[:num_before] -= shared
        late = np.full(self.late_steps, levels[-1])
        return np.concatenate([levels, late]), end - self.forecast.step - 1

    def _expected_tokens(self, request: Request) -> int:
        """Return how many tokens a request is expected to compute; the last is not."""
        generated, most = request.num_output_tokens, request.max_tokens
        if _may_stop(request):
            most = self.lengths.expected(generated, most)
        return min(request.num_prompt_tokens + most, self.max_model_len) - 1

    # -- who may go on ------------------------------------------------------------

    def must_wait(self, request_id: str, computed: int, num_new: int) -> bool:
        """Return whether a running request has to sit this step out for others.

        It has to where the superblocks that it would take are the last ones with which
        somebody gets to an event or the end. Where nobody does, vLLM preempts.
        """
        if self._bounded(request_id) is None:
            return False
        needed = self.manager.num_needed(request_id, computed + num_new)
        if needed <= 0:
            return False
        left = self.manager.num_free - needed
        if self._somebody_proceeds(left, request_id, needed):
            return False
        must_wait = self._somebody_proceeds(self.manager.num_free)
        self.num_waits += must_wait
        return must_wait

    def _somebody_proceeds(
        self, free: int, served: str | None = None, given: int = 0
    ) -> bool:
        """Return whether a bounded request gets to where it gives superblocks back.

        Args:
            free: superblocks that there are for it.
            served: a request that has been given some more.
            given: how many.
        """
        if free < 0:
            return False
        return any(
            self._missing(request_id) - given * (request_id == served) <= free
            for request_id in self.forecast.bookings
        )

    def _missing(self, request_id: str) -> int:
        """Return what a request takes until its next event or its end."""
        event = self.planner.coming_event(request_id)
        end = min(event, self._last[request_id])
        return self.manager.num_needed(request_id, end) + self._discount(request_id)

    def is_bounded(self, request_id: str) -> bool:
        """Return whether it is known what a request will hold."""
        return self._bounded(request_id) is not None

    def _bounded(self, request_id: str) -> RequestState | None:
        """Return the state of such a request, None for others."""
        state = self.planner.states.get(request_id)
        return None if state is None or state.footprint.keeps_all else state


def _may_stop(request: Request) -> bool:
    """Return whether an answer may end before `max_tokens`."""
    params = request.sampling_params
    if params is None:
        return False
    return not params.ignore_eos or bool(params.stop or params.stop_token_ids)
