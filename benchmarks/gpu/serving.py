"""Owns the parts in which engines serve the same requests in turn, with equal memory.

Stock is vLLM as it is by default, with prefix caching and graphs. `share` is that of
the bytes that stock's KV cache needs to run all requests of a load at once; every
engine gets as many bytes, and a policy pays from them for what it holds beside the
pool. Engines start once, with the pool of the load that has the largest; blocks are
held back from them while others run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.parts import Options, Part, Table, Verdict
from benchmarks.gpu.process import Cell, take_turns
from benchmarks.gpu.record import Record
from benchmarks.workload import Workload, pool_blocks

STOCK, FP8, POLICY = "stock", "fp8", "ams-tova"
PRESSURE = "ams-tova, pressure"
ADVISED = "ams-expected, pressure"
BOTH = f"fp8, {ADVISED}"
EVENTS = {
    POLICY: ("ams-tova", "always"),
    PRESSURE: ("ams-tova", "pressure"),
    ADVISED: ("ams-expected", "pressure"),
    BOTH: ("ams-expected", "pressure"),
}
"""Engine -> its policy, and when that has events."""
TOKEN_IDS = tuple(range(10, 500))
WARM_UP_REQUESTS = 9
WARM_UP_SECONDS = 6.0
WARM_UP_SHARE = 0.95
"""Of what prompts take, so that a scheduler calls for events."""
MARGIN_TOKENS = 64
"""Beside the longest request, in max_model_len."""
BLOCK_TOKENS = 32
"""What pools are rounded to: a multiple of every block size in use."""
COLUMNS = {
    "output_tok_s": ".0f",
    "ttft_ms": ".0f",
    "tpot_ms": ".2f",
    "itl_p50_ms": ".2f",
    "itl_p99_ms": ".2f",
    "peak_running": ".0f",
    "mean_running": ".1f",
    "preemptions": ".0f",
    "events": ".0f",
    "blocks_returned": ".0f",
}
SPEED_TARGET, ROOM_TARGET = 1.1, 0.98
"""Against stock: where memory is short, and where there is room for all."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once, and the pool that they get.

    Args:
        output_tokens: of each, forced.
        share: size of the pool.
        limit_s: most seconds of one measurement; longer ones are cut off, and say so.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    share: float
    budget: int
    limit_s: float

    def __str__(self) -> str:
        lengths = f"{self.prompt_tokens} + {self.output_tokens}"
        return f"{self.requests} x ({lengths}), {self.share:g}"

    @property
    def longest(self) -> int:
        """Tokens of a whole request."""
        return self.prompt_tokens + self.output_tokens

    @property
    def prompts(self) -> tuple[int, ...]:
        """Lengths of all prompts."""
        return (self.prompt_tokens,) * self.requests

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds."""
        sizes = self.output_tokens, BLOCK_TOKENS, self.share
        return BLOCK_TOKENS * pool_blocks(self.prompts, *sizes)

    def tiny(self, number: int) -> "Load":
        """Return one of the same form that a CPU can do, the `number`-th of several."""
        share = min(1.0, self.share + 0.4)
        return Load(4, 40, 200 - 40 * number, share, 96 - 8 * number, 60.0)


@dataclass(frozen=True)
class Contest(Part):
    """Engines that get the same requests.

    Args:
        interval: tokens between two events.
    """

    loads: tuple[Load, ...]
    engines: tuple[str, ...] = (STOCK, POLICY, PRESSURE, FP8)
    interval: int = 256

    def tiny(self) -> "Contest":
        """Return one of the same form that a CPU can do."""
        loads = tuple(load.tiny(n) for n, load in enumerate(self.loads[:2]))
        # vLLM's attention for CPUs may lack an FP8 cache.
        engines = [name for name in self.engines if name in (STOCK, PRESSURE, ADVISED)]
        return replace(self, loads=loads, engines=tuple(engines), interval=32)

    @property
    def pool_tokens(self) -> int:
        """Of the load that has most."""
        return max(load.pool_tokens for load in self.loads)

    def specs(self, options: Options) -> list[EngineSpec]:
        """Return what to start."""
        requests = max(load.requests for load in self.loads)
        fields: dict[str, Any] = {
            "max_model_len": max(load.longest for load in self.loads) + MARGIN_TOKENS,
            "max_num_seqs": max(requests, WARM_UP_REQUESTS),
        }
        budget = max(load.budget for load in self.loads)
        found = []
        for name in self.engines:
            changes: dict[str, Any] = {}
            if name in (FP8, BOTH):
                changes["settings"] = {"kv_cache_dtype": "fp8"}
            if name in EVENTS:
                policy, events = EVENTS[name]
                changes["policy"] = {
                    "policy": policy,
                    "budget": budget,
                    "interval": self.interval,
                    "events": events,
                }
            settings = {**fields, **changes}
            found.append(options.engine(name, self.pool_tokens, **settings))
        return found

    def names(self, options: Options) -> list[str]:
        """Return the names of all cells."""
        return [name_of(load, engine) for load in self.loads for engine in self.engines]

    def run(self, record: Record, options: Options) -> None:
        """Measure what the record lacks."""
        warm_ups, load = [], self.loads[0]
        for engine in self.engines:
            all_of_them = self.arguments(load, engine) | {"number": -1}
            few = self.warm_up(load)
            share = WARM_UP_SHARE * sum(few.prompt_tokens) / self.pool_tokens
            changes = {"workload": few, "share": min(share, 1.0)}
            warm_ups.append(Cell(engine, "round", all_of_them | changes))
            changes = {"limit_s": WARM_UP_SECONDS}
            warm_ups.append(Cell(engine, "round", all_of_them | changes))
        cells = [
            Cell(engine, "round", self.arguments(load, engine), name_of(load, engine))
            for load in self.loads
            for engine in self.engines
        ]
        specs = self.specs(options)
        longest = max(load.limit_s for load in self.loads)
        take_turns(record, options, specs, warm_ups, cells, longest)

    def arguments(self, load: Load, engine: str) -> dict[str, Any]:
        """Return those of BenchEngine.round."""
        return {
            "workload": Workload(TOKEN_IDS, load.prompts, load.output_tokens, 0),
            "number": 0,
            "extra": {"kv_budget": load.budget} if engine in EVENTS else None,
            "limit_s": load.limit_s,
            "share": load.pool_tokens / self.pool_tokens,
        }

    def warm_up(self, load: Load) -> Workload:
        """Return a few requests that have an event at the prompt's end and another."""
        tokens = min(load.budget + self.interval + 1, load.longest - 2)
        output = min(self.interval + 8, load.longest - tokens)
        return Workload(TOKEN_IDS, (tokens,) * WARM_UP_REQUESTS, output, 1)

    def found(self, record: Record, load: Load) -> dict[str, Row]:
        """Return what was measured of a load, by engine."""
        names = {engine: name_of(load, engine) for engine in self.engines}
        cells = record.cells
        return {key: cells[name] for key, name in names.items() if name in cells}

    def table(self, record: Record, options: Options) -> Table:
        """Return what was measured; `x` is output tokens per second over stock's."""
        lines = []
        for load in self.loads:
            found = self.found(record, load)
            for engine, row in found.items():
                speed = ratio(found, engine, "output_tok_s")
                figures = (
                    format(row[column], form) for column, form in COLUMNS.items()
                )
                name = engine + ("" if row["complete"] else " (cut off)")
                faster = "-" if speed is None else f"{speed:.2f}"
                lines.append([str(load), name, faster, *figures])
        return ["load, share", "engine", "x", *COLUMNS], lines

    def verdicts(self, record: Record, options: Options) -> list[Verdict]:
        """Return the policies' speed beside its target."""
        answers = []
        for load in self.loads:
            found = self.found(record, load)
            for engine in (name for name in found if name in EVENTS):
                speed = ratio(found, engine, "output_tok_s")
                if speed is not None:
                    target = ROOM_TARGET if load.share == 1 else SPEED_TARGET
                    name = f"{load}, {engine}: output tok/s"
                    answers.append(Verdict(name, speed, target))
        return answers


def name_of(load: Load, engine: str) -> str:
    """Return the name of a cell, as records have it."""
    return f"{load}, {engine}, round 0"


def ratio(
    found: Mapping[str, Mapping[str, Any]], engine: str, column: str
) -> float | None:
    """Return an engine's figure over stock's; None where one is missing or cut off.

    What is cut off favours stock, whose contexts are still short.
    """
    base = found.get(STOCK)
    if base is None or not (base["complete"] and found[engine]["complete"]):
        return None
    return found[engine][column] / base[column] if base[column] else None


# Of an 8-billion-parameter model in bfloat16 all four engines of `serving` fit on a
# card of 140 GB, two on one of 80 GB.
PARTS = {
    "serving": Contest(
        (
            Load(48, 200, 8192, 0.3, 1024, 200.0),
            *(Load(48, 200, 2048, share, 384, 70.0) for share in (0.25, 0.4, 0.6, 1)),
        )
    ),
    "contest": Contest(
        (Load(64, 200, 8192, 0.3, 1024, 230.0),), (STOCK, FP8, ADVISED, BOTH), 512
    ),
}
