"""What the scheduler counts of its requests, beside the superblocks that they hold."""

from collections import Counter
from typing import Any

from support.engine.simulator_pages import Asked, check


class CountCheck:
    """The counters of one engine.

    Attributes:
        peaks: most superblocks that each request has held, preempted or not.
        cut: requests that have had an event.
    """

    def __init__(self, scheduler: Any, asked: dict[str, Asked]) -> None:
        self.scheduler, self.asked = scheduler, asked
        self.totals: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.cut: set[str] = set()
        manager, policy = scheduler.kv_cache_manager, scheduler.kv_policy_manager
        allocate = manager.allocate_slots

        def counted(request: Any, *args: Any, **options: Any) -> Any:
            found, name = allocate(request, *args, **options), request.request_id
            rows = policy.req_to_blocks.get(name, ()), policy._windows.get(name, ())
            held = sum(not block.is_null for row in rows for block in row)
            self.peaks[name] = max(self.peaks[name], held)
            return found

        manager.allocate_slots = counted

    def follow(self, output: Any, num_held: int) -> None:
        """Count a step, at whose end requests hold so many superblocks together."""
        self.cut |= {event.request_id for event in output.kv_policy_commands.events}
        if output.num_scheduled_tokens:
            running = len(self.scheduler.running)
            self.totals.update(steps=1, request_steps=running, block_steps=num_held)

    def finish(self) -> None:
        """Compare when all requests have ended."""
        held = {name for name, most in self.peaks.items() if most}
        asked = {name: self.asked[name] for name in held}
        bounded = {n for n, each in asked.items() if each.plan and not each.keeps_all}
        wanted = dict(self.totals) | {"requests": len(held)}
        wanted |= {"bounded_requests": len(bounded)}
        wanted |= {"uncut_requests": len(bounded - self.cut)}
        if not self.scheduler.kv_policy_manager.others.managers:
            wanted["peak_blocks"] = self.peaks.total()
        found = self.scheduler.kv_policy_counters.read()
        found = {name: found[name] for name in wanted}
        check(found == wanted, "counted", found, "instead of", wanted)
        check(not self.scheduler._peaks_before_preemption, "peaks left")
