"""Owns part c: steps in which every request decodes one token, at long contexts.

Stock holds the contexts whole, the policy has cut them down to its budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.models import token_bytes
from benchmarks.gpu.plan import Options, Part, Verdict
from benchmarks.gpu.process import EngineProcess, describe, groups_that_fit, running
from benchmarks.gpu.record import Record
from benchmarks.gpu.serving_parts import FP8, POLICY, STOCK, TOKEN_IDS
from benchmarks.gpu.timing import copy_bytes_per_second
from benchmarks.workload import Workload

ATTENTION_NAMES = ("flash", "unified_attention", "reduce_segments", "fmha")
"""Parts of the names of attention kernels of vLLM's backends."""
NOT_ATTENTION = "reshape_and_cache"
SMALL_CARD, SMALL_CONTEXTS = 2**37, (8192, 16384)
"""Bytes of a card on which stock cannot hold the longest contexts, and what it can."""
COPY = "copy"
SPEED_CONTEXT, SPEED_TARGET = 16384, 2.0
FLOOR_TARGET = 0.85
WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Steps:
    """What part c measures.

    Args:
        contexts: prompt lengths.
        batch: requests.
        budget: of the policy.
        interval: of the policy.
        prefill_interval: of the policy.
        steps: timed by the host's clock.
        profiled: further steps, timed by kernel.
        limit_s: most seconds of one measurement.
        engines: measured, alive together as far as they fit on the GPU.
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

    @property
    def output_tokens(self) -> int:
        """Of each request: some decode while others still read their prompts."""
        return 3 * (self.steps + self.profiled) + WARM_UP_TOKENS

    def engine(self, name: str, options: Options) -> EngineSpec:
        """Return what to start."""
        longest = max(self.contexts) + self.output_tokens
        held = longest
        policy = None
        settings: dict[str, Any] = {"enable_prefix_caching": False}
        if name == POLICY:
            held = min(longest, self.budget + self.prefill_interval + 2 * self.interval)
            policy = {
                "policy": POLICY,
                "budget": self.budget,
                "interval": self.interval,
                "prefill_interval": self.prefill_interval,
            }
        elif name == FP8:
            held, settings["kv_cache_dtype"] = longest // 2 + 1, "fp8"
        return options.engine(
            name,
            # A few blocks more than the tokens fill.
            self.batch * (held + 64) + 4096,
            max_model_len=longest + 1,
            max_num_seqs=self.batch,
            policy=policy,
            settings=settings,
        )


STEPS = Steps()
TINY_STEPS = Steps((96, 160), 2, 80, 48, 64, 6, 0, 60.0, (STOCK, POLICY))


def steps_of(options: Options) -> Steps:
    """Return what to measure."""
    if options.is_tiny:
        return TINY_STEPS
    if (options.card_bytes or 0) < SMALL_CARD:
        return replace(STEPS, contexts=SMALL_CONTEXTS)
    return STEPS


def step_names(options: Options) -> list[str]:
    """Return the names of part c's measurements."""
    plan = steps_of(options)
    cells = [f"{context}, {name}" for context in plan.contexts for name in plan.engines]
    return [COPY, *cells]


def run_steps(record: Record, options: Options) -> None:
    """Measure what the record lacks of part c."""
    plan = steps_of(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def copy() -> dict[str, float]:
        speed = copy_bytes_per_second(device)
        torch.cuda.empty_cache()
        return {"bytes_per_second": speed}

    options.measure(record, COPY, 10, copy)
    specs = [plan.engine(name, options) for name in plan.engines]
    for together in groups_that_fit(specs, options.card_bytes):
        group = [spec.name for spec in together]
        wanted = [f"{context}, {name}" for context in plan.contexts for name in group]
        missing = [name for name in wanted if name not in record.cells]
        if not missing or not options.has_time(missing, plan.limit_s):
            continue
        with running(together) as engines:
            facts = describe(engines)
            for name in group:
                _decode(engines[name], plan, min(plan.contexts), facts[name])
            for context in plan.contexts:
                for name in group:
                    options.measure(
                        record,
                        f"{context}, {name}",
                        plan.limit_s,
                        partial(_decode, engines[name], plan, context, facts[name]),
                    )


def _decode(
    engine: EngineProcess, plan: Steps, context: int, about: dict[str, Any]
) -> dict[str, Any]:
    workload = Workload(TOKEN_IDS, (context,) * plan.batch, plan.output_tokens, 0)
    found = engine.call(
        "decode", workload=workload, number=0, steps=plan.steps, profiled=plan.profiled
    )
    return found | {"engine": about}


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


def step_table(
    record: Record, options: Options
) -> tuple[Sequence[str], list[list[str]]]:
    """Return part c's figures."""
    header = ["context", "engine", "step ms", "/ stock", "held", "attention ms"]
    header += ["floor ms", "floor / attention", "GB/s"]
    lines = []
    for name in step_names(options)[1:]:
        if name not in record.cells:
            continue
        cell = record.cells[name]
        context, engine = name.split(", ")
        base = record.cells.get(f"{context}, {STOCK}")
        spent, floor = attention_ms(cell), floor_ms(record, options, cell)
        copied = record.cells[COPY]["bytes_per_second"]
        lines.append(
            [
                context,
                engine,
                f"{cell['median_ms']:.3f}",
                "-"
                if base is None
                else f"{base['median_ms'] / cell['median_ms']:.2f} x",
                str(cell["held_tokens"]),
                "-" if spent is None else f"{spent:.3f}",
                f"{floor:.3f}",
                "-" if spent is None else f"{floor / spent:.2f}",
                "-" if spent is None else f"{copied * floor / spent / 1e9:.0f}",
            ]
        )
    return header, lines


def step_verdicts(record: Record, options: Options) -> list[Verdict]:
    """Return part c's figures that have a target."""
    found = []
    for context in steps_of(options).contexts:
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


PARTS = {
    "c": Part(
        "decode steps at 8k, 16k and 32k tokens, attention beside the bandwidth floor",
        run_steps,
        step_names,
        step_table,
        step_verdicts,
        has_engines=True,
    ),
}
