"""Owns part d: what events cost, by phase, and what they do to gaps between tokens.

Events are timed on the GPU's time line, see `timing.watched`; gaps are compared with
stock's at the same concurrency, in rounds that nothing watches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.plan import Options, Part, Verdict
from benchmarks.gpu.process import EngineProcess, describe, running
from benchmarks.gpu.record import Record
from benchmarks.gpu.serving_parts import (
    POLICY,
    SIDE_TOKENS,
    STOCK,
    TOKEN_IDS,
    WARM_UP_SECONDS,
)
from benchmarks.gpu.timing import EVENT
from benchmarks.workload import Workload

PHASE_NAMES = ("usage", "score", "select", "compact")
EVENT_TARGET, ITL_TARGET = 0.015, 1.15


@dataclass(frozen=True)
class Events:
    """What part d measures.

    Args:
        policies: served by one engine.
        intervals: tokens between events; the first is the server's.
        requests: sent at once.
        prompt_tokens: of each, so long that the prompt's end is an event.
        output_tokens: of each, forced.
        budget: of the policies.
        rounds: of everything.
        limit_s: most seconds of one measurement.
    """

    policies: tuple[str, ...] = (POLICY, "snapkv", "keydiff", "streaming")
    intervals: tuple[int, ...] = (512, 128)
    requests: int = 64
    prompt_tokens: int = 1600
    output_tokens: int = 1024
    budget: int = 1024
    rounds: int = 2
    limit_s: float = 40.0

    @property
    def cells(self) -> list[tuple[str, int, dict[str, Any] | None, bool]]:
        """Name, round, knobs (None for stock) and whether phases are timed."""
        found: list[tuple[str, int, dict[str, Any] | None, bool]] = []
        for number in range(self.rounds):
            found.append((f"{STOCK}, round {number}", number, None, False))
            for interval in self.intervals:
                for policy in self.policies:
                    knobs = {"kv_policy": policy, "kv_interval": interval}
                    name = f"{policy}, interval {interval}, round {number}"
                    found.append((name, number, knobs, False))
                    if not number:
                        found.append((f"{name}, phases", number, knobs, True))
        return found

    def engines(self, options: Options) -> list[EngineSpec]:
        """Return what to start."""
        longest = self.prompt_tokens + self.output_tokens
        fields = {
            "pool_tokens": self.requests * (longest + 64),
            "max_model_len": longest + 1,
            "max_num_seqs": self.requests,
        }
        policy = {
            "policy": self.policies[0],
            "allow": list(self.policies[1:]),
            "budget": self.budget,
            "interval": self.intervals[0],
        }
        held = max(self.prompt_tokens, self.budget + max(self.intervals))
        more = {"pool_tokens": self.requests * (held + 64 + SIDE_TOKENS)}
        return [
            options.engine(STOCK, **fields),
            options.engine(POLICY, **fields | more, policy=policy),
        ]


EVENTS = Events()
TINY_EVENTS = Events((POLICY, "streaming"), (64, 48), 3, 180, 70, 96, 1)


def events_of(options: Options) -> Events:
    """Return what to measure."""
    return TINY_EVENTS if options.is_tiny else EVENTS


def event_names(options: Options) -> list[str]:
    """Return the names of part d's measurements."""
    return [cell[0] for cell in events_of(options).cells]


def run_events(record: Record, options: Options) -> None:
    """Measure what the record lacks of part d."""
    plan = events_of(options)
    missing = [name for name in event_names(options) if name not in record.cells]
    if not missing or not options.has_time(missing, plan.limit_s):
        return
    lengths = (plan.prompt_tokens,) * plan.requests
    workload = Workload(TOKEN_IDS, lengths, plan.output_tokens, 0)
    few = Workload(TOKEN_IDS, lengths[:9], plan.intervals[-1] + 8, 1)
    with running(plan.engines(options)) as engines:
        facts = describe(engines)
        warmed: list[dict[str, Any] | None] = []
        for number, (_, _, knobs, _) in enumerate(plan.cells):
            if knobs not in warmed:
                warmed.append(knobs)
                engine = engines[STOCK if knobs is None else POLICY]
                engine.call("round", workload=few, number=-1 - number, extra=knobs)
        for engine in engines.values():  # with the sizes of the whole batch
            engine.call("round", workload=workload, number=-99, limit_s=WARM_UP_SECONDS)
        for name, number, knobs, watch in plan.cells:
            which = STOCK if knobs is None else POLICY
            call = partial(
                _round, engines[which], facts[which], workload, number, knobs, watch
            )
            options.measure(record, name, plan.limit_s, call)


def _round(
    engine: EngineProcess,
    about: dict[str, Any],
    workload: Workload,
    number: int,
    knobs: dict[str, Any] | None,
    watch: bool,
) -> dict[str, Any]:
    found = engine.call(
        "round", workload=workload, number=number, extra=knobs, watch=watch
    )
    return found | {"engine": about}


def phases(cell: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds of a round by phase: of events, and of page tables.

    `rest` is what events spend outside the operations; `decode` is the whole round.
    """
    times = {name: sum(spans) for name, spans in cell["phases_ms"].items()}
    found = {name: times.get(name, 0.0) for name in (EVENT, *PHASE_NAMES)}
    found["rest"] = found[EVENT] - sum(found[name] for name in PHASE_NAMES)
    return found | {
        "tables": times.get("tables", 0.0),
        "decode": sum(cell["step_ms"]),
    }


def event_table(
    record: Record, options: Options
) -> tuple[Sequence[str], list[list[str]]]:
    """Return part d's figures: milliseconds per event, shares of the round."""
    parts = [EVENT, *PHASE_NAMES, "rest"]
    header = ["policy", "events", *(f"{part}, ms each" for part in parts)]
    header += ["share", "tables, us a step", "p99 ITL / stock"]
    lines = []
    for name in event_names(options):
        cell = record.cells.get(f"{name}, phases")
        if cell is None:
            continue
        spent, events = phases(cell), max(cell["events"], 1)
        itl = _itl_ratio(record, options, name)
        lines.append(
            [
                name.rpartition(", round")[0],
                f"{cell['events']:.0f}",
                *(f"{spent[part] / events:.4f}" for part in parts),
                f"{spent[EVENT] / spent['decode']:.2%}",
                f"{1e3 * spent['tables'] / cell['steps']:.1f}",
                "-" if itl is None else f"{itl:.3f} x",
            ]
        )
    return header, lines


def _itl_ratio(record: Record, options: Options, name: str) -> float | None:
    """Return the median over rounds of p99 ITL over stock's in the same round."""
    label = name.rpartition(", round ")[0]
    found = []
    for number in range(events_of(options).rounds):
        ours = record.cells.get(f"{label}, round {number}")
        base = record.cells.get(f"{STOCK}, round {number}")
        if ours is not None and base is not None:
            found.append(ours["itl_p99_ms"] / base["itl_p99_ms"])
    return median(found) if found else None


def event_verdicts(record: Record, options: Options) -> list[Verdict]:
    """Return part d's figures that have a target, at the server's interval."""
    plan = events_of(options)
    found = []
    for policy in plan.policies:
        name = f"{policy}, interval {plan.intervals[0]}, round 0"
        cell = record.cells.get(f"{name}, phases")
        if cell is None:
            continue
        spent = phases(cell)
        share = spent[EVENT] / spent["decode"]
        label = f"{policy}: events / decode time"
        found.append(Verdict(label, share, EVENT_TARGET, at_most=True))
        itl = _itl_ratio(record, options, name)
        if itl is not None:
            found.append(Verdict(f"{policy}: p99 ITL", itl, ITL_TARGET, at_most=True))
    return found


PARTS = {
    "d": Part(
        "events split into usage, selection, compaction and the rest",
        run_events,
        event_names,
        event_table,
        event_verdicts,
        has_engines=True,
    ),
}
