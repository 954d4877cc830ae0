"""Owns the parts in which engines serve the same requests in turn, with equal memory.

Stock is vLLM as it is by default, with prefix caching and graphs. `share` is that of
the bytes that stock's KV cache needs to run all requests at once; every engine gets as
many bytes, and a policy pays from them for what it holds beside the pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.parts import Options, Part, Verdict
from benchmarks.gpu.process import Cell, groups_that_fit, take_turns
from benchmarks.gpu.record import Record
from benchmarks.workload import Workload, pool_blocks

STOCK, FP8, POLICY = "stock", "fp8", "ams-tova"
NEVER = "never binding"
TOKEN_IDS = tuple(range(10, 500))
WARM_UP_REQUESTS = 9
WARM_UP_SECONDS = 6.0
MARGIN_TOKENS = 64
"""Beside the longest request, in max_model_len."""
SIDE_TOKENS = 128
"""Per request, of bytes that a policy has beside a pool for all requests."""
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
SPEED_TARGET, CONCURRENCY_TARGET, NEVER_TARGET = 2.0, 2.0, 0.99


@dataclass(frozen=True)
class Contest(Part):
    """Engines and variants of them that get the same requests.

    Args:
        requests: sent at once: the first number with which all engines fit on the
            card together, else the last.
        prompt_tokens: of each.
        output_tokens: of each, forced.
        share: size of the pool.
        budgets: variants of the policy; None for one that is never reached.
        rounds: of everything, with new prompts.
        limit_s: most seconds of one measurement; longer ones are cut off, and say so.
        interval: tokens between two events.
    """

    requests: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    share: float
    budgets: tuple[int | None, ...]
    rounds: int = 1
    limit_s: float = 60.0
    interval: int = 512

    def tiny(self) -> "Contest":
        """Return one of the same form that a CPU can do."""
        return replace(
            self,
            requests=(4,),
            prompt_tokens=40,
            output_tokens=200,
            share=min(1.0, self.share + 0.4),
            budgets=tuple(each and 96 - 8 * n for n, each in enumerate(self.budgets)),
            rounds=1,
            interval=32,
        )

    @property
    def longest(self) -> int:
        """Tokens of a whole request."""
        return self.prompt_tokens + self.output_tokens

    def variants(self, options: Options) -> dict[str, tuple[str, Any]]:
        """Return name -> engine and the requests' own knobs."""
        found: dict[str, tuple[str, Any]] = {STOCK: (STOCK, None)}
        for budget in self.budgets:
            name = NEVER if budget is None else f"budget {budget}"
            found[name] = (POLICY, budget and {"kv_budget": budget})
        if not options.is_tiny:  # vLLM's attention for CPUs may lack it
            found[FP8] = (FP8, None)
        return found

    def engines(self, options: Options, requests: int) -> list[EngineSpec]:
        """Return what to start for so many requests."""
        prompts = (self.prompt_tokens,) * requests
        blocks = pool_blocks(prompts, self.output_tokens, BLOCK_TOKENS, self.share)
        tokens = blocks * BLOCK_TOKENS
        fields: dict[str, Any] = {
            "max_model_len": self.longest + MARGIN_TOKENS,
            "max_num_seqs": max(requests, WARM_UP_REQUESTS),
        }
        budgets = [each or fields["max_model_len"] for each in self.budgets]
        policy = {"policy": POLICY, "budget": max(budgets), "interval": self.interval}
        # With room for everybody the question is not what fits.
        more = SIDE_TOKENS * requests if self.share == 1.0 else 0
        specs = {
            STOCK: options.engine(STOCK, tokens, **fields),
            POLICY: options.engine(POLICY, tokens + more, **fields, policy=policy),
            FP8: options.engine(
                FP8, tokens, **fields, settings={"kv_cache_dtype": "fp8"}
            ),
        }
        wanted = dict.fromkeys(which for which, _ in self.variants(options).values())
        return [specs[name] for name in wanted]

    def chosen_engines(self, options: Options) -> tuple[int, list[EngineSpec]]:
        """Return how many requests are sent, and what to start for them."""
        for requests in self.requests:
            specs = self.engines(options, requests)
            if len(groups_that_fit(specs, options.card_bytes)) == 1:
                break
        return requests, specs

    def names(self, options: Options) -> list[str]:
        """Return round by round the variants, which take turns in going first."""
        variants, found = list(self.variants(options)), []
        for number in range(self.rounds):
            first = number % len(variants)
            in_turn = variants[first:] + variants[:first]
            found += [f"{variant}, round {number}" for variant in in_turn]
        return found

    def run(self, record: Record, options: Options) -> None:
        """Measure what the record lacks."""
        requests, specs = self.chosen_engines(options)
        variants = self.variants(options)
        lengths = (self.prompt_tokens,) * requests
        workload = Workload(TOKEN_IDS, lengths, self.output_tokens, 0)
        warm_ups, cells = [], []
        for engine, knobs in variants.values():
            fixed = {"number": -1, "extra": knobs}
            few = {"workload": self.warm_up(knobs and knobs["kv_budget"])}
            all_of_them = {"workload": workload, "limit_s": WARM_UP_SECONDS}
            warm_ups.append(Cell(engine, "round", fixed | few))
            warm_ups.append(Cell(engine, "round", fixed | all_of_them))
        for name in self.names(options):
            variant, _, number = name.rpartition(", round ")
            engine, knobs = variants[variant]
            arguments = {
                "workload": workload,
                "number": int(number),
                "extra": knobs,
                "limit_s": self.limit_s,
            }
            cells.append(Cell(engine, "round", arguments, name))
        take_turns(record, options, specs, warm_ups, cells, self.limit_s)

    def warm_up(self, budget: int | None) -> Workload:
        """Return a few requests that have an event at the prompt's end and another."""
        tokens, output = self.prompt_tokens, 2 * MARGIN_TOKENS
        if budget is not None:
            tokens, output = budget + self.interval + 1, self.interval + 8
        tokens = min(tokens, self.longest - 2)
        output = min(output, self.longest - tokens)
        return Workload(TOKEN_IDS, (tokens,) * WARM_UP_REQUESTS, output, 1)

    def medians(self, record: Record, options: Options) -> dict[str, dict[str, Any]]:
        """Return variant -> medians over rounds of COLUMNS, and whether all ended."""
        found = {}
        for variant in self.variants(options):
            names = (f"{variant}, round {number}" for number in range(self.rounds))
            cells = [record.cells[name] for name in names if name in record.cells]
            if cells:
                row = {key: median(cell[key] for cell in cells) for key in COLUMNS}
                found[variant] = row | {"complete": all(c["complete"] for c in cells)}
        return found

    def table(
        self, record: Record, options: Options
    ) -> tuple[list[str], list[list[str]]]:
        """Return what was measured; `x` is output tokens per second over stock's."""
        found = self.medians(record, options)
        lines = []
        for variant, row in found.items():
            speed = ratio(found, variant, "output_tok_s")
            lines.append(
                [
                    variant + ("" if row["complete"] else " (cut off)"),
                    "-" if speed is None else f"{speed:.2f}",
                    *(format(row[column], form) for column, form in COLUMNS.items()),
                ]
            )
        return ["engine", "x", *COLUMNS], lines

    def verdicts(self, record: Record, options: Options) -> list[Verdict]:
        """Return the policy's figures beside their targets."""
        found = self.medians(record, options)
        answers = []
        for variant in found:
            speed = ratio(found, variant, "output_tok_s")
            if variant in (STOCK, FP8) or speed is None:
                continue
            ours, base = found[variant], found[STOCK]
            preempted = f"{ours['preemptions']:.0f} : {base['preemptions']:.0f}"
            label = f"{variant} (preempted {preempted})"
            target = NEVER_TARGET if variant == NEVER else SPEED_TARGET
            answers.append(Verdict(f"{label}: output tok/s", speed, target))
            if variant != NEVER:
                at_once = ours["mean_running"] / base["mean_running"]
                name = f"{label}: mean concurrency"
                answers.append(Verdict(name, at_once, CONCURRENCY_TARGET))
        return answers


def ratio(
    found: Mapping[str, Mapping[str, Any]], variant: str, column: str
) -> float | None:
    """Return a variant's figure over stock's; None where one is missing or cut off.

    What is cut off favours stock, whose contexts are still short.
    """
    base = found.get(STOCK)
    if base is None or not (base["complete"] and found[variant]["complete"]):
        return None
    return found[variant][column] / base[column] if base[column] else None


# Of an 8-billion-parameter model in bfloat16 the smaller numbers of requests fit on a
# card of 80 GB with all three engines alive, the larger ones on one of 140 GB.
PARTS = {
    "serving": Contest((64, 24), 200, 8192, 0.3, (1024,), limit_s=270),
    "never": Contest((64, 40), 700, 512, 1.0, (None,), rounds=5, limit_s=25),
    "short": Contest((192, 96), 700, 1024, 0.3, (256, 512, 1024), interval=128),
}
