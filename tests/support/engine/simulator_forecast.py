"""Compares what admission foresees with what requests hold, in every step."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from support.engine.simulator_engine import Scenario
from support.engine.simulator_pages import Asked, check
from vllm_kvpolicy.events import after_any_event


class ForecastCheck:
    """The forecast of one engine beside its blocks."""

    def __init__(
        self,
        scheduler: Any,
        scenario: Scenario,
        asked: dict[str, Asked],
        totals: Counter[str],
    ) -> None:
        self.scheduler, self.scenario = scheduler, scenario
        self.asked, self.totals = asked, totals
        # Who asks for room, and for how many steps it has.
        self.asking: tuple[str, int] = "", 0
        if not scenario.foresees:
            admission = scheduler.kv_policy_entry
            admission.admits = lambda request, computed, num_new, *_: num_new
            admission.allowed = lambda request, computed, num_new, victim: num_new

    def check(self, output: Any) -> None:
        """Check the forecast of the step that has just been scheduled.

        In the step of an event it is the larger of what is held before and after it.
        While a prompt takes several steps, under dynamic policies and beside windows,
        it is a bound.
        """
        if not self.scenario.foresees:
            return
        admission, manager = self._parts()
        self._check_preempted(output.preempted_req_ids or ())
        self._check_asking(admission)
        self._check_floors(admission)
        step = admission.forecast.step - 1
        with_event = {event.request_id for event in output.kv_policy_commands.events}
        for name in output.num_scheduled_tokens:
            booking = admission.forecast.bookings.get(name)
            asked = self.asked[name]
            is_bounded = asked.plan is not None and not asked.keeps_all
            check((booking is not None) == is_bounded, name, "booked", booking)
            if booking is None:
                continue
            index = step - booking.start
            check(0 <= index < len(booking.levels), name, "not booked for", step)
            foreseen = booking.levels[index]
            held = manager.num_held(name) - admission.shared.discount(name, step)
            check(held <= foreseen, name, "holds", held, "foreseen", foreseen)
            if booking.offset is None or asked.is_dynamic or name in with_event:
                continue
            if self.scenario.drafts:  # how far a step gets is not known before
                continue
            # What lies in windows is a bound, too.
            is_exact = held == foreseen
            check(is_exact or self.scenario.windows, name, held, "foreseen", foreseen)
            self.totals["foreseen exactly"] += is_exact

    def _check_floors(self, admission: Any) -> None:
        """Check that what is booked at floors is no more than what is booked."""
        if not admission.calls_events:
            return
        forecast, at_floors = admission.forecast, admission.pressure.at_floors
        check(forecast.step == at_floors.step, forecast.step, at_floors.step)
        check(forecast.bookings.keys() == at_floors.bookings.keys(), "other bookings")
        for name, booking in forecast.bookings.items():
            other = at_floors.bookings[name]
            check(booking.start == other.start, name, booking.start, other.start)
            check(
                (other.levels <= booking.levels).all(), name, "holds more at its floor"
            )

    def _check_preempted(self, names: Collection[str]) -> None:
        """Check that the most urgent ones leave for nobody: to the others they do."""
        requests, bounded = self.scheduler.requests, self._parts()[0].is_bounded
        ran = [*names, *(each.request_id for each in self.scheduler.running)]
        if self.scenario.resets:  # which preempt everybody
            return
        if self.scenario.priorities and self._knows_lengths and all(map(bounded, ran)):
            least = max((each.priority for each in self.scheduler.running), default=0)
            urgent = [name for name in names if requests[name].priority < least]
            check(not urgent, urgent, "preempted for less urgent ones")
            self.totals["preempted for urgent ones"] += len(names)
        elif names and self._knows_lengths and all(map(bounded, ran)):
            self._check_did_not_fit(ran)

    def _check_did_not_fit(self, names: Collection[str]) -> None:
        """Check that requests would not have fitted, at the most of their floors.

        Those that fit on the average may be at their most together.
        """
        together = sum(map(self._most_at_floor, names))
        usable = self._parts()[1].num_usable
        check(together > usable, names, "fit:", together, "of", usable)
        self.totals["preempted at a price"] += 1

    def _most_at_floor(self, name: str) -> float:
        """Return the most superblocks of one that is cut as often as it may be."""
        admission, manager = self._parts()
        request, state = self.scheduler.requests[name], admission.planner.states[name]
        footprint, size = state.footprint, state.footprint.block_size
        last = request.num_prompt_tokens + request.max_tokens - 1
        whole = -(-last // size) + manager.others.sizes.most_blocks(last)
        if not state.plan.is_called:
            return min(admission.pressure.floor(state, last), whole)
        # The next call goes out in the step after an event, at the soonest. The last
        # event inside a prompt may leave no room for one at its end.
        stretch = state.spacing + 1 + admission.late_steps
        if request.num_output_tokens <= 2 * stretch:
            stretch += footprint.events.prefill_interval
        at = footprint.events.budget, footprint.recent, stretch, size
        most = after_any_event(*at) + footprint.window_blocks
        most += -(-footprint.ahead // size) + manager.others.sizes.most_blocks(last, 1)
        if request.num_computed_tokens < request.num_tokens - 1:  # as it began
            most = max(most, manager.num_held(name))
        return min(most, whole)

    def _check_asking(self, admission: Any) -> None:
        """Check that one who fits beside the most of all floors enters soon.

        That takes a window, a step for each share of events, and two spacings of
        events; and before that, the prompts that are being computed. One who fits on
        the average waits for others to be at their least together. With drafts nobody
        knows how far others get in a step, and what they may take counts as taken.
        """
        if self.scenario.drafts:
            return
        demand = admission.pressure._demand
        name, steps = self.asking
        if name not in demand:
            self.asking = next(iter(demand), ""), 0
            return
        states = admission.planner.states
        spacing = max(states[each].spacing for each in admission.running)
        running = self.scheduler.running
        names = [each.request_id for each in running]
        if all(map(admission.is_bounded, names)):
            together = demand[name] + sum(map(self._most_at_floor, names))
            fits = together <= admission.manager.num_usable
            steps += fits and not any(each.is_prefill_chunk for each in running)
            self.totals["steps that ask for what fits"] += fits
        self.asking = name, steps
        most = admission.pressure.lead_steps + 2 * spacing
        check(steps < most, name, "has waited", steps, "steps for room, of", most)

    @property
    def _knows_lengths(self) -> bool:
        scenario = self.scenario
        return scenario.foresees and not (scenario.stops or scenario.drafts)

    def finish(self) -> None:
        """Check that nothing is left."""
        admission, _ = self._parts()
        is_exact = self._knows_lengths and not self.scenario.priorities
        self.totals["engines with known lengths"] += is_exact
        self.totals["waits"] += admission.num_waits
        self.totals["held back"] += admission.num_held_back
        self.totals["calls"] += sum(admission.pressure.num_calls.values())
        check(not admission.forecast.bookings, "booked", admission.forecast.bookings)
        left = admission.shared.by_request, admission.last
        check(not any(left), "admission left over", *left)
        pressure = admission.pressure
        check(not pressure.at_floors.bookings and not pressure._floors, "floors left")
        check(not pressure._windows and not admission._waits, "windows or waits left")
        check(pressure.at_floors.most() < 1e-6, "floors foreseen with nobody there")
        left = admission.forecast.most()
        check(not left, "foreseen with nobody there", left)

    def _parts(self) -> tuple[Any, Any]:
        scheduler = self.scheduler
        return scheduler.kv_policy_entry, scheduler.kv_policy_manager
