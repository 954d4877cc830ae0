"""Sends waves to a server and its control, and looks at both after each."""

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import open_session
from benchmarks.printing import log
from benchmarks.server import Server, ServerError
from benchmarks.soak import fuzz, probes, slopes, storm, watch
from benchmarks.soak.asks import Ask, draw_wave
from benchmarks.soak.probes import Probe
from benchmarks.soak.promises import ENGINE, PROBES, Ledger
from benchmarks.soak.settings import NO_POLICY, POLICIES
from benchmarks.soak.storm import Outcome
from benchmarks.stats import percentile

STORM_REQUESTS, FUZZ_REQUESTS = 40, 12
"""Of a wave."""


@dataclass
class Side:
    """One of the two servers.

    Attributes:
        requests: sent so far in waves.
        seconds: of the answers of each quiet moment.
    """

    server: Server
    questions: list[Probe] = field(default_factory=list)
    samples: list[watch.Sample] = field(default_factory=list)
    requests: int = 0
    seconds: list[list[float]] = field(default_factory=list)


@dataclass
class Soak:
    """A soak of a server with policies beside a stock server.

    Attributes:
        ours: the server with policies.
        stock: the control.
        counts: requests to `ours`, by kind and what became of them.
        stock_failures: valid requests that stock did not answer in full.
        stock_changes: answers of stock to its fixed question that were not as before.
        growth: of memory and of the time of answers, None while there are few moments.
    """

    ours: Side
    stock: Side
    seed: int
    ledger: Ledger
    counts: Counter[str] = field(default_factory=Counter)
    stock_failures: int = 0
    stock_changes: int = 0
    growth: dict[str, Any] = field(default_factory=dict)

    async def run(self, minutes: float) -> None:
        """Send waves until the time is up, at least one.

        Raises:
            BrokenPromise: the first promise that did not hold.
        """
        await self._prepare()
        ends, number = time.monotonic() + 60 * minutes, 0
        while number == 0 or time.monotonic() < ends:
            await self._wave(number)
            number += 1
            log(
                f"wave {number}: {self.ours.requests} requests, "
                f"{self.ledger.checks.total()} checks, "
                f"{max(0, ends - time.monotonic()) / 60:.1f} minutes left"
            )
        self._judge_growth()

    async def _prepare(self) -> None:
        """Record what the idle servers answer."""
        ours, stock = self.ours, self.stock
        ours.questions = await probes.record(ours.server.url, (*POLICIES, NO_POLICY))
        known = await probes.record(stock.server.url, (None,))
        stock.questions = known * len(ours.questions)
        async with (
            open_session(ours.server.url) as session,
            session.get("/openapi.json") as response,
        ):
            self.openapi = await response.json()

    async def _wave(self, number: int) -> None:
        """Send a wave to both servers, one after the other, and look at both."""
        for side in (self.ours, self.stock):
            is_ours = side is self.ours
            asks = draw_wave(self.seed, number, STORM_REQUESTS)
            if not is_ours:
                asks = [ask.without_knobs() for ask in asks if ask.refused is None]
            bad = fuzz.draw(self.seed, number, FUZZ_REQUESTS, self.openapi, is_ours)
            outcomes = await storm.play(side.server.url, [*asks, *bad])
            side.requests += STORM_REQUESTS + FUZZ_REQUESTS
            if is_ours:
                await self._judge(asks + bad, outcomes)
            else:
                self._count_failures(asks, outcomes)
            await self._look(side, number)

    async def _judge(self, asks: list[Ask], outcomes: list[Outcome]) -> None:
        """Count and check what the requests of a wave got."""
        for ask, outcome in zip(asks, outcomes, strict=True):
            end = {None: "left", 200: "answered", 400: "refused"}
            self.counts[f"{ask.kind}, {end.get(outcome.status, 'other')}"] += 1
            if ask.kind != fuzz.KIND:
                storm.judge(ask, outcome, self.ledger)
                continue
            theirs = None
            if fuzz.has_failed(outcome):
                plain = ask.without_knobs()
                theirs = (await storm.play(self.stock.server.url, [plain]))[0]
            fuzz.check(ask, outcome, theirs, self.ledger)

    def _count_failures(self, asks: list[Ask], outcomes: list[Outcome]) -> None:
        for ask, outcome in zip(asks, outcomes, strict=False):
            if outcome.status is not None:
                is_good = outcome.status == 200 and storm.is_whole(ask, outcome)
                self.stock_failures += not is_good

    async def _look(self, side: Side, number: int) -> None:
        """Look at a server once its clients have gone; stock's answers only count."""
        is_ours = side is self.ours
        try:
            left = await watch.wait_for_quiet(side.server)
            seconds, answers = await probes.check(
                side.server.url, side.questions, number
            )
            found = await asyncio.to_thread(watch.sample, side.server, side.requests)
        except watch.NO_ANSWER as error:
            said = f"{side.server.name} does not answer any more: {error!r}"
            if is_ours:
                self.ledger.check(ENGINE, False, said)
            raise ServerError(said) from error
        side.seconds.append(seconds)
        side.samples.append(found)
        if is_ours:
            for what in answers:
                self.ledger.check(PROBES, what is None, str(what))
            first = side.samples[0]
            watch.check_quiet(side.server, first, found, left, self.ledger)
        else:
            self.stock_changes += sum(what is not None for what in answers)

    def _judge_growth(self) -> None:
        """Compare what grew, once: both servers have had as many quiet moments."""
        requests = [each.requests for each in self.ours.samples]
        held = [
            [float(each.total_bytes) for each in side.samples]
            for side in (self.ours, self.stock)
        ]
        medians = [
            [statistics.median(each) for each in side.seconds]
            for side in (self.ours, self.stock)
        ]
        self.growth = {
            "memory_slopes": slopes.check_memory(requests, *held, self.ledger),
            "quiet_latency_growth": slopes.check_latency(*medians, self.ledger),
        }

    def summary(self) -> dict[str, Any]:
        """Return what a record says of the waves so far."""
        return {
            "requests": self.ours.requests,
            "kinds": dict(sorted(self.counts.items())),
            "stock_failures": self.stock_failures,
            "stock_changes": self.stock_changes,
            **self.growth,
            "probe_margins": {
                str(each.policy): round(each.margin, 4) for each in self.ours.questions
            },
            **{
                name: {
                    "quiet_answer_s": _percentiles(side.seconds),
                    "quiet_medians_s": [
                        round(statistics.median(each), 3) for each in side.seconds
                    ],
                    "moments": watch.record_of(side.samples),
                }
                for name, side in (("ours", self.ours), ("stock", self.stock))
            },
        }


def _percentiles(seconds: list[list[float]]) -> dict[str, float] | None:
    """Return the median and the 99th percentile of all seconds."""
    every = [each for moment in seconds for each in moment]
    if not every:
        return None
    return {
        name: round(percentile(every, percent), 3)
        for name, percent in (("p50", 50), ("p99", 99))
    }
