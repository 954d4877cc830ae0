"""Which (re)computation of a request its events and tokens belong to."""

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

NO_COMMANDS = SimpleNamespace(events=())  # of stock vLLM
Cut = tuple[int, int]  # of an event: its position, and its budget in tokens


class Passes:
    """The preemptions of all requests of one scheduler.

    Attributes:
        events: events that a request had before each of its preemptions.
        tokens: per generated token of a request, preemptions before it was computed.
        record: of each event of a request, what the scheduler has told the worker.
    """

    def __init__(self) -> None:
        self.events: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.record: defaultdict[str, list[Cut]] = defaultdict(list)

    @property
    def num_preemptions(self) -> int:
        """Requests that lost their blocks, counted each time."""
        return sum(map(len, self.events.values()))

    def watch(self, scheduler: Any) -> None:
        """Follow a scheduler from now on; it has no requests yet."""
        after, preempt = scheduler._update_after_schedule, scheduler._preempt_request
        take = scheduler.update_from_output

        def scheduled(output: Any) -> None:
            after(output)
            # Stock schedulers attach no commands.
            is_stock = not hasattr(scheduler, "kv_policy_planner")
            commands = NO_COMMANDS if is_stock else output.kv_policy_commands
            for event in commands.events:
                cut = event.position, event.budget
                self.record[event.request_id].append(cut)
            # With the step, for it is answered when the next has been scheduled.
            output.preemptions_before = {
                name: len(self.events.get(name, ()))
                for name in output.num_scheduled_tokens
            }

        def preempted(request: Any, *args: Any, **kwargs: Any) -> Any:
            name = request.request_id
            self.events.setdefault(name, []).append(len(self.record[name]))
            return preempt(request, *args, **kwargs)

        def taken(output: Any, answer: Any) -> Any:
            before = output.preemptions_before
            requests = [scheduler.requests.get(name) for name in before]
            lengths = [each and each.num_output_tokens for each in requests]
            found = take(output, answer)
            for request, length in zip(requests, lengths, strict=True):
                if request is not None:
                    name = request.request_id
                    new = request.num_output_tokens - length
                    self.tokens.setdefault(name, []).extend([before[name]] * new)
            return found

        scheduler._update_after_schedule = scheduled
        scheduler._preempt_request, scheduler.update_from_output = preempted, taken

    def split(self, name: str, events: list[Any]) -> list[list[Any]]:
        """Return a request's events, one list for each time it was (re)computed."""
        edges = [0, *self.events.get(name, ()), len(events)]
        return [events[first:last] for first, last in pairwise(edges)]
