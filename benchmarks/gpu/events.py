"""Owns the part `events`: what they cost, and what they do to gaps between tokens.

Events are timed on the GPU's time line, see `timing.watched`; gaps are compared with
stock's at the same concurrency, in rounds that nothing watches.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.parts import Options, Part, Table, Verdict
from benchmarks.gpu.process import Cell, take_turns
from benchmarks.gpu.record import Record
from benchmarks.gpu.serving import (
    POLICY,
    STOCK,
    TOKEN_IDS,
    WARM_UP_REQUESTS,
    WARM_UP_SECONDS,
)
from benchmarks.gpu.timing import EVENT, PHASES
from benchmarks.workload import Workload

SIDE_TOKENS = 128
"""Per request, of bytes that a policy has beside what requests hold."""
WITHIN_EVENTS = ("usage", "score", "select", "compact")
"""Phases of PHASES; the rest of an event is the moving of everything else."""
EVENT_TARGET, ITL_TARGET = 0.015, 1.15


@dataclass(frozen=True)
class Events(Part):
    """What is measured.

    Args:
        policies: served by one engine.
        intervals: tokens between events; the first is the server's.
        prompt_tokens: of each, so long that the prompt's end is an event.
        output_tokens: of each, forced.
    """

    policies: tuple[str, ...] = (POLICY, "snapkv", "keydiff", "streaming")
    intervals: tuple[int, ...] = (512, 128)
    requests: int = 64
    prompt_tokens: int = 1600
    output_tokens: int = 1024
    budget: int = 1024
    rounds: int = 2
    limit_s: float = 40.0

    def tiny(self) -> "Events":
        """Return one that a CPU can do."""
        return Events((POLICY, "streaming"), (64, 48), 3, 180, 70, 96, 1)

    def workload(self) -> Workload:
        """Return the requests."""
        lengths = (self.prompt_tokens,) * self.requests
        return Workload(TOKEN_IDS, lengths, self.output_tokens, 0)

    def cells(self) -> list[Cell]:
        """Return stock and every policy, in its first round also with phases timed."""
        found = []
        for number in range(self.rounds):
            fixed = {"workload": self.workload(), "number": number}
            found.append(Cell(STOCK, "round", fixed, f"{STOCK}, round {number}"))
            for interval in self.intervals:
                for policy in self.policies:
                    knobs = {"kv_policy": policy, "kv_interval": interval}
                    name = f"{policy}, interval {interval}, round {number}"
                    asked = fixed | {"extra": knobs}
                    found.append(Cell(POLICY, "round", asked, name))
                    if not number:
                        watched = asked | {"watch": True}
                        found.append(Cell(POLICY, "round", watched, f"{name}, phases"))
        return found

    def engines(self, options: Options) -> list[EngineSpec]:
        """Return what to start."""
        longest = self.prompt_tokens + self.output_tokens
        fields = {"max_model_len": longest + 1, "max_num_seqs": self.requests}
        policy = {
            "policy": self.policies[0],
            "allow": list(self.policies[1:]),
            "budget": self.budget,
            "interval": self.intervals[0],
        }
        held = max(self.prompt_tokens, self.budget + max(self.intervals)) + SIDE_TOKENS
        whole, cut = (self.requests * (tokens + 64) for tokens in (longest, held))
        return [
            options.engine(STOCK, whole, **fields),
            options.engine(POLICY, cut, **fields, policy=policy),
        ]

    def names(self, options: Options) -> list[str]:
        """Return the names of the cells."""
        return [cell.name for cell in self.cells()]

    def run(self, record: Record, options: Options) -> None:
        """Measure what the record lacks."""
        few = Workload(
            TOKEN_IDS,
            (self.prompt_tokens,) * WARM_UP_REQUESTS,
            self.intervals[-1] + 8,
            1,
        )
        asked: list[Cell] = []
        for cell in self.cells():  # every policy and interval once
            knobs = cell.arguments.get("extra")
            if all(knobs != each.arguments["extra"] for each in asked):
                arguments = {"workload": few, "number": -1 - len(asked), "extra": knobs}
                asked.append(Cell(cell.engine, "round", arguments))
        whole = {"workload": self.workload(), "number": -99, "limit_s": WARM_UP_SECONDS}
        asked += [Cell(name, "round", whole) for name in (STOCK, POLICY)]
        specs = self.engines(options)
        take_turns(record, options, specs, asked, self.cells(), self.limit_s)

    def table(self, record: Record, options: Options) -> Table:
        """Return milliseconds per event, and shares of the round."""
        parts = [EVENT, *WITHIN_EVENTS, "rest"]
        header = ["policy", "events", *(f"{part}, ms each" for part in parts)]
        header += ["share", "tables, us a step", "p99 ITL / stock"]
        lines = []
        for name in self.names(options):
            cell = record.cells.get(f"{name}, phases")
            if cell is None:
                continue
            spent, events = phases(cell), max(cell["events"], 1)
            label = name.rpartition(", round")[0]
            itl = self.itl_ratio(record, label)
            lines.append(
                [
                    label,
                    f"{cell['events']:.0f}",
                    *(f"{spent[part] / events:.4f}" for part in parts),
                    f"{spent[EVENT] / spent['decode']:.2%}",
                    f"{1e3 * spent['tables'] / cell['steps']:.1f}",
                    "-" if itl is None else f"{itl:.3f} x",
                ]
            )
        return header, lines

    def itl_ratio(self, record: Record, label: str) -> float | None:
        """Return the median over rounds of p99 ITL over stock's in the same round."""
        found = []
        for number in range(self.rounds):
            ours = record.cells.get(f"{label}, round {number}")
            base = record.cells.get(f"{STOCK}, round {number}")
            if ours is not None and base is not None:
                found.append(ours["itl_p99_ms"] / base["itl_p99_ms"])
        return median(found) if found else None

    def verdicts(self, record: Record, options: Options) -> list[Verdict]:
        """Return the figures that have a target, at the server's interval."""
        found = []
        for policy in self.policies:
            label = f"{policy}, interval {self.intervals[0]}"
            cell = record.cells.get(f"{label}, round 0, phases")
            if cell is None:
                continue
            spent = phases(cell)
            share = spent[EVENT] / spent["decode"]
            name = f"{policy}: events / decode time"
            found.append(Verdict(name, share, EVENT_TARGET, at_most=True))
            itl = self.itl_ratio(record, label)
            if itl is not None:
                name = f"{policy}: p99 ITL"
                found.append(Verdict(name, itl, ITL_TARGET, at_most=True))
        return found


def phases(cell: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds of a round by phase: of events, and of page tables.

    `rest` is what events spend outside the operations; `decode` is the whole round.
    """
    spans = {name: sum(each) for name, each in cell["spans_ms"].items()}
    found = {
        phase: sum(spans.get(name, 0.0) for name in operations)
        for phase, operations in PHASES.items()
    }
    found[EVENT] = spans[EVENT]
    found["rest"] = found[EVENT] - sum(found[name] for name in WITHIN_EVENTS)
    return found | {"decode": sum(cell["step_ms"])}
