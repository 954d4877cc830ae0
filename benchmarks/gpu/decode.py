"""Owns the part `decode`: steps in which every request decodes one token.

Stock holds the contexts whole, the policy has cut them down to its budget. Times of
attention stand beside that in which the kept bytes can be read.
"""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.models import token_bytes
from benchmarks.gpu.parts import COPY, Options, Part, Table, Verdict, measure_copy
from benchmarks.gpu.process import Cell, take_turns
from benchmarks.gpu.record import Record
from benchmarks.gpu.serving import FP8, POLICY, STOCK, TOKEN_IDS
from benchmarks.workload import Workload

ATTENTION_NAMES = ("flash", "unified_attention", "reduce_segments", "fmha")
"""Parts of the names of attention kernels of vLLM's backends."""
NOT_ATTENTION = "reshape_and_cache"
SMALL_CARD, SMALL_CONTEXT = 2**37, 16384
"""Bytes of a card on which stock cannot hold longer contexts than these."""
SPEED_CONTEXT, SPEED_TARGET, FLOOR_TARGET = 16384, 2.0, 0.85
WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Decode(Part):
    """What is measured.

    Args:
        steps: timed by the host's clock.
        profiled: further steps, timed by kernel.
    """

    contexts: tuple[int, ...] = (8192, 16384, 32768)
    batch: int = 16
    budget: int = 1024
    interval: int = 512
    prefill_interval: int = 4096
    steps: int = 64
    profiled: int = 8
    limit_s: float = 60.0
    engines: tuple[str, ...] = (STOCK, POLICY, FP8)

    def tiny(self) -> "Decode":
        """Return one that a CPU can do."""
        return Decode((96, 160), 2, 80, 48, 64, 6, 0, engines=(STOCK, POLICY))

    def fitting(self, options: Options) -> "Decode":
        """Return one of the contexts that the card has room for."""
        if options.card_bytes is None or options.card_bytes >= SMALL_CARD:
            return self
        contexts = (each for each in self.contexts if each <= SMALL_CONTEXT)
        return replace(self, contexts=tuple(contexts))

    @property
    def output_tokens(self) -> int:
        """Of each request: some decode while others still read their prompts."""
        return 3 * (self.steps + self.profiled) + WARM_UP_TOKENS

    def engine(self, name: str, options: Options) -> EngineSpec:
        """Return what to start."""
        longest = held = max(self.contexts) + self.output_tokens
        policy, settings = None, {"enable_prefix_caching": False}
        if name == POLICY:
            held = min(longest, self.budget + self.prefill_interval + 2 * self.interval)
            policy = {
                "policy": POLICY,
                "budget": self.budget,
                "interval": self.interval,
                "prefill_interval": self.prefill_interval,
            }
        elif name == FP8:
            held = longest // 2 + 1
            settings |= {"kv_cache_dtype": "fp8"}
        return options.engine(
            name,
            # A few blocks more than the tokens fill.
            self.batch * (held + 64) + 4096,
            max_model_len=longest + 1,
            max_num_seqs=self.batch,
            policy=policy,
            settings=settings,
        )

    def names(self, options: Options) -> list[str]:
        """Return the speed of a copy, and engines by context."""
        plan = self.fitting(options)
        return [COPY, *(f"{c}, {name}" for c in plan.contexts for name in plan.engines)]

    def run(self, record: Record, options: Options) -> None:
        """Measure what the record lacks."""
        plan = self.fitting(options)
        measure_copy(record, options)
        specs = [plan.engine(name, options) for name in plan.engines]
        warm_ups = [plan.cell(min(plan.contexts), name) for name in plan.engines]
        cells = [plan.cell(c, name) for c in plan.contexts for name in plan.engines]
        take_turns(record, options, specs, warm_ups, cells, plan.limit_s)

    def cell(self, context: int, engine: str) -> Cell:
        """Return the measurement of an engine at a context."""
        lengths = (context,) * self.batch
        arguments = {
            "workload": Workload(TOKEN_IDS, lengths, self.output_tokens, 0),
            "number": 0,
            "steps": self.steps,
            "profiled": self.profiled,
        }
        return Cell(engine, "decode", arguments, f"{context}, {engine}")

    def table(self, record: Record, options: Options) -> Table:
        """Return steps beside stock's, and attention beside its floor."""
        header = ["context", "engine", "step ms", "/ stock", "held", "attention ms"]
        header += ["floor ms", "floor / attention", "GB/s"]
        lines = []
        for name in self.names(options)[1:]:
            if name not in record.cells:
                continue
            cell = record.cells[name]
            context, engine = name.split(", ")
            base = record.cells.get(f"{context}, {STOCK}")
            speed = base and base["median_ms"] / cell["median_ms"]
            spent, floor = attention_ms(cell), floor_ms(record, options, cell)
            line = [context, engine, f"{cell['median_ms']:.3f}"]
            line += [
                "-" if speed is None else f"{speed:.2f} x",
                f"{cell['held_tokens']}",
            ]
            if spent is None:
                lines.append([*line, "-", f"{floor:.3f}", "-", "-"])
                continue
            share = floor / spent
            read = share * record.cells[COPY]["bytes_per_second"] / 1e9
            line += [f"{spent:.3f}", f"{floor:.3f}", f"{share:.2f}", f"{read:.0f}"]
            lines.append(line)
        return header, lines

    def verdicts(self, record: Record, options: Options) -> list[Verdict]:
        """Return the policy's figures that have a target."""
        found = []
        for context in self.fitting(options).contexts:
            cell = record.cells.get(f"{context}, {POLICY}")
            base = record.cells.get(f"{context}, {STOCK}")
            if cell is None or base is None:
                continue
            if context == SPEED_CONTEXT or options.is_tiny:
                speed = base["median_ms"] / cell["median_ms"]
                found.append(Verdict(f"{context}: decode speed", speed, SPEED_TARGET))
            spent = attention_ms(cell)
            if spent is not None:
                share = floor_ms(record, options, cell) / spent
                name = f"{context}: bandwidth floor / attention"
                found.append(Verdict(name, share, FLOOR_TARGET))
        return found


def attention_ms(cell: dict[str, Any]) -> float | None:
    """Return the milliseconds of attention kernels in a step; None off a GPU."""
    times = [
        value
        for name, value in cell["kernels_ms"].items()
        if any(part in name.lower() for part in ATTENTION_NAMES)
        and NOT_ATTENTION not in name.lower()
    ]
    return sum(times) or None


def floor_ms(record: Record, options: Options, cell: dict[str, Any]) -> float:
    """Return the least milliseconds in which a step's kept bytes can be read."""
    value = 1 if "fp8" in cell["engine"]["cache_dtype"] else 2
    kept = cell["held_tokens"] * token_bytes(options.model, value)
    return 1e3 * kept / record.cells[COPY]["bytes_per_second"]
