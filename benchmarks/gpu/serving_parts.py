"""Owns the parts in which engines serve the same requests in turn: min, a and b.

Stock is vLLM as it is by default, with prefix caching and graphs. The engines of a
contest are alive together, each in a process of its own, and take turns. `share` is
that of the bytes that stock's KV cache needs to run all requests at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.models import token_bytes
from benchmarks.gpu.plan import Options, Part, Verdict
from benchmarks.gpu.process import describe, groups_that_fit, running
from benchmarks.gpu.record import Record
from benchmarks.workload import Workload

STOCK, FP8, POLICY = "stock", "fp8", "ams-tova"
INTERVAL = 128
TOKEN_IDS = tuple(range(10, 500))
WARM_UP_REQUESTS = 9
WARM_UP_SECONDS = 6.0
MARGIN_TOKENS = 64
"""Beside the longest request, in max_model_len."""
SIDE_TOKENS = 128
"""Per request, of bytes that a policy's engine has beside the pool, at least."""
BLOCK_TOKENS = 32
"""What pools are rounded up to: a multiple of every block size in use."""
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
RATIOS = ("output_tok_s", "peak_running", "itl_p99_ms")
SHARE_TARGETS = {0.4: 1.5, 0.3: 2.0, 0.25: 2.5}
CONCURRENCY_SHARE, CONCURRENCY_TARGET = 0.3, 4.0
ITL_TARGET = 1.15
NEVER_TARGET = 0.99


@dataclass(frozen=True)
class Contest:
    """Engines and variants of them that get the same requests.

    Args:
        requests: sent at once.
        prompt_tokens: of each.
        output_tokens: of each, forced.
        shares: sizes of the pool.
        budgets: variants of the policy; None for one that is never reached.
        rounds: of everything, with new prompts.
        limit_s: most seconds of one measurement; longer ones are cut off, and say so.
        with_fp8: stock with an FP8 KV cache is an engine, too.
        shared_tokens: leading tokens that all prompts have in common.
        interval: tokens between two events.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    shares: tuple[float, ...] = (1.0, 0.4, 0.3, 0.25)
    budgets: tuple[int | None, ...] = ()
    rounds: int = 1
    limit_s: float = 60.0
    with_fp8: bool = False
    shared_tokens: int = 0
    interval: int = INTERVAL

    def tiny(self) -> "Contest":
        """Return one of the same form that a CPU can do."""
        budgets = tuple(each and 96 - 8 * n for n, each in enumerate(self.budgets))
        return replace(
            self,
            requests=4,
            prompt_tokens=40,
            output_tokens=200,
            shares=(1.0, 0.7) if len(self.shares) > 1 else self.shares,
            budgets=budgets,
            rounds=1,
            shared_tokens=min(self.shared_tokens, 32),
            interval=32,
        )

    @property
    def longest(self) -> int:
        """Tokens of a whole request."""
        return self.prompt_tokens + self.output_tokens

    @property
    def variants(self) -> dict[str, tuple[str, dict[str, Any] | None]]:
        """Name -> engine and the requests' own knobs."""
        found: dict[str, tuple[str, dict[str, Any] | None]] = {STOCK: (STOCK, None)}
        if self.with_fp8:
            found[FP8] = (FP8, None)
        for budget in self.budgets:
            if budget is None:
                found["never binding"] = (POLICY, None)
            else:
                found[f"budget {budget}"] = (POLICY, {"kv_budget": budget})
        return found

    def workload(self) -> Workload:
        """Return the requests."""
        lengths = (self.prompt_tokens,) * self.requests
        if self.shared_tokens:
            return SharedStart(
                TOKEN_IDS, lengths, self.output_tokens, 0, self.shared_tokens
            )
        return Workload(TOKEN_IDS, lengths, self.output_tokens, 0)

    def warm_up(self, budget: int | None) -> Workload:
        """Return a few requests that have an event at the prompt's end and another."""
        if budget is None:
            tokens, output = self.prompt_tokens, 2 * MARGIN_TOKENS
        else:
            tokens, output = budget + self.interval + 1, self.interval + 8
        tokens = min(tokens, self.longest - 1)
        output = min(output, self.longest - tokens)
        return Workload(TOKEN_IDS, (tokens,) * WARM_UP_REQUESTS, max(output, 2), 1)

    def engines(self, options: Options) -> list[EngineSpec]:
        """Return what to start."""
        fields = {
            "pool_tokens": self.requests * (self.longest + MARGIN_TOKENS),
            "max_model_len": self.longest + MARGIN_TOKENS,
            "max_num_seqs": max(self.requests, WARM_UP_REQUESTS),
        }
        specs = [options.engine(STOCK, **fields)]
        if self.budgets:
            budgets = [each or fields["max_model_len"] for each in self.budgets]
            policy = {"policy": POLICY, "budget": max(budgets)}
            policy["interval"] = self.interval
            more = {"pool_tokens": fields["pool_tokens"] + SIDE_TOKENS * self.requests}
            specs.append(options.engine(POLICY, **fields | more, policy=policy))
        if self.with_fp8:
            quantised = {"kv_cache_dtype": "fp8"}
            specs.append(options.engine(FP8, **fields, settings=quantised))
        return specs

    def pool_tokens(self, share: float) -> int:
        """Return the tokens of a pool: of all requests, in whole blocks, times a share.

        vLLM keeps one block of every pool for itself.
        """
        whole = -(-self.longest // BLOCK_TOKENS) * BLOCK_TOKENS * self.requests
        return (-(-int(share * whole) // BLOCK_TOKENS) + 1) * BLOCK_TOKENS


@dataclass(frozen=True)
class SharedStart(Workload):
    """Requests whose prompts begin alike.

    Attributes:
        shared_tokens: how many tokens they have in common.
    """

    shared_tokens: int = field(default=0)

    def prompts(self, round_number: int) -> list[list[int]]:
        """Return the prompts of a round, as token ids."""
        prompts = super().prompts(round_number)
        start = prompts[0][: self.shared_tokens]
        return [start + prompt[self.shared_tokens :] for prompt in prompts]


def contests_of(name: str, options: Options) -> dict[str, Contest]:
    """Return the contests of a part by name."""
    found = CONTESTS[name]
    if options.is_tiny:
        return {key: contest.tiny() for key, contest in found.items()}
    return found


def cells_of(contest: Contest, prefix: str) -> list[tuple[str, int, float, str]]:
    """Return name, round, share and variant of each measurement, in order.

    Variants take turns in going first.
    """
    found = []
    variants = list(contest.variants)
    for number in range(contest.rounds):
        for share in contest.shares:
            first = number % len(variants)
            for variant in variants[first:] + variants[:first]:
                name = f"{prefix}, share {share:g}, {variant}, round {number}"
                found.append((name, number, share, variant))
    return found


def names(part: str, options: Options) -> list[str]:
    """Return the names of a part's measurements."""
    return [
        cell[0]
        for prefix, contest in contests_of(part, options).items()
        for cell in cells_of(contest, prefix)
    ]


def run(part: str, record: Record, options: Options) -> None:
    """Measure what the record lacks."""
    for prefix, contest in contests_of(part, options).items():
        cells = cells_of(contest, prefix)
        if any(cell[0] not in record.cells for cell in cells):
            hold(contest, cells, record, options)


def hold(
    contest: Contest,
    cells: Sequence[tuple[str, int, float, str]],
    record: Record,
    options: Options,
) -> None:
    """Start a contest's engines, as many as fit, warm them up, and measure in turn."""
    for specs in groups_that_fit(contest.engines(options), options.card_bytes):
        hold_together(specs, contest, cells, record, options)


def hold_together(
    specs: Sequence[EngineSpec],
    contest: Contest,
    cells: Sequence[tuple[str, int, float, str]],
    record: Record,
    options: Options,
) -> None:
    """Measure those of a contest's engines that are alive together."""
    alive = {spec.name for spec in specs}
    variants = {
        name: pair for name, pair in contest.variants.items() if pair[0] in alive
    }
    cells = [cell for cell in cells if cell[3] in variants]
    missing = [cell[0] for cell in cells if cell[0] not in record.cells]
    if not missing or not options.has_time(missing, contest.limit_s):
        return
    workload = contest.workload()
    token = token_bytes(options.model, specs[0].value_bytes)
    with running(specs) as engines:
        facts = describe(engines)
        for engine, extra in variants.values():
            few = contest.warm_up(extra and extra["kv_budget"])
            call = partial(engines[engine].call, "round", number=-1, extra=extra)
            call(workload=few)
            call(workload=workload, limit_s=WARM_UP_SECONDS)
        for name, number, share, variant in cells:
            engine, extra = variants[variant]
            measured = partial(
                engines[engine].call,
                "round",
                workload=workload,
                number=number,
                pool_bytes=contest.pool_tokens(share) * token,
                # With room for everybody the question is not what fits.
                has_more=share == 1.0,
                extra=extra,
                limit_s=contest.limit_s,
            )
            about = {"engine": facts[engine]}
            options.measure(
                record, name, contest.limit_s, partial(_merged, measured, about)
            )


def _merged(measured: Callable[[], dict[str, Any]], about: dict[str, Any]) -> Any:
    return measured() | about


def medians(
    part: str, record: Record, options: Options
) -> dict[tuple[str, float, str], dict[str, float]]:
    """Return contest, share and variant -> medians over rounds of COLUMNS."""
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for prefix, contest in contests_of(part, options).items():
        for name, _, share, variant in cells_of(contest, prefix):
            if name in record.cells:
                key = prefix, share, variant
                found.setdefault(key, []).append(record.cells[name])
    return {
        key: {column: median(cell[column] for cell in cells) for column in COLUMNS}
        | {"complete": all(cell["complete"] for cell in cells)}
        for key, cells in found.items()
    }


def ratio(
    found: Mapping[tuple[str, float, str], Mapping[str, float]],
    key: tuple[str, float, str],
    column: str,
) -> float | None:
    """Return a variant's figure over stock's, None where there is none."""
    base = found.get((key[0], key[1], STOCK))
    return found[key][column] / base[column] if base and base[column] else None


def table(
    part: str, record: Record, options: Options
) -> tuple[Sequence[str], list[list[str]]]:
    """Return what was measured; `x` is output tokens per second over stock's."""
    found = medians(part, record, options)
    lines = []
    for key, row in found.items():
        prefix, share, variant = key
        speed = ratio(found, key, "output_tok_s")
        lines.append(
            [
                f"{prefix}, {share:g}",
                variant + ("" if row["complete"] else " (cut off)"),
                "-" if speed is None else f"{speed:.2f}",
                *(format(row[column], form) for column, form in COLUMNS.items()),
            ]
        )
    return ["share", "engine", "x", *COLUMNS], lines


def verdicts(part: str, record: Record, options: Options) -> list[Verdict]:
    """Return the figures of the policy that have a target."""
    found = medians(part, record, options)
    answers = []
    for key in found:
        prefix, share, variant = key
        if variant in (STOCK, FP8) or ratio(found, key, RATIOS[0]) is None:
            continue
        speed, running_at_once, itl = (ratio(found, key, each) for each in RATIOS)
        base = found[(prefix, share, STOCK)]
        preempted = f"{found[key]['preemptions']:.0f} : {base['preemptions']:.0f}"
        label = f"{prefix}, share {share:g}, {variant} (preempted {preempted})"
        if variant == "never binding":
            if "shared" not in prefix:
                answers.append(Verdict(f"{label}: output tok/s", speed, NEVER_TARGET))
            continue
        if share in SHARE_TARGETS:
            target = SHARE_TARGETS[share]
            answers.append(Verdict(f"{label}: output tok/s", speed, target))
        if share == CONCURRENCY_SHARE:
            name = f"{label}: peak concurrency"
            answers.append(Verdict(name, running_at_once, CONCURRENCY_TARGET))
        if share == 1.0:  # all requests run at once on both
            answers.append(Verdict(f"{label}: p99 ITL", itl, ITL_TARGET, at_most=True))
    return answers


# Of an 8-billion-parameter model in bfloat16, `a` and `min-32` fit on a card of 80 GB
# with two engines alive together, the other parts on one of 140 GB.
CONTESTS = {
    "min": {
        "200 in, 4096 out": Contest(
            80, 200, 4096, (1.0, 0.3), budgets=(1024,), limit_s=110
        )
    },
    "min-32": {
        "32 x 200 in, 4096 out": Contest(
            32, 200, 4096, (0.3, 1.0), budgets=(1024,), limit_s=80
        )
    },
    "a": {
        "700 in, 512 out": Contest(
            64, 700, 512, (1.0,), budgets=(None,), rounds=5, with_fp8=True, limit_s=25
        ),
        "512 shared of 700 in, 512 out": Contest(
            64,
            700,
            512,
            (1.0,),
            budgets=(None,),
            rounds=2,
            limit_s=25,
            shared_tokens=512,
        ),
    },
    "b-short": {"700 in, 1024 out": Contest(192, 700, 1024, budgets=(256, 512, 1024))},
    "b-long": {
        "200 in, 8192 out": Contest(
            40, 200, 8192, budgets=(512, 1024, 2048), limit_s=100
        )
    },
    "b-fp8": {
        "700 in, 1024 out": Contest(192, 700, 1024, with_fp8=True),
        "200 in, 8192 out": Contest(40, 200, 8192, with_fp8=True, limit_s=100),
    },
}
SUMMARIES = {
    "min": "the minimum set: long answers, budget 1,024, all and 0.3 of the memory",
    "min-32": "the same with 32 requests, which fit on a card of 80 GB",
    "a": "policy on, never binding, beside stock and FP8",
    "b-short": "700 in + 1,024 out at four pool sizes",
    "b-long": "200 in + 8,192 out at four pool sizes",
    "b-fp8": "both workloads of b, FP8 KV cache beside stock",
}
PARTS = {
    name: Part(
        SUMMARIES[name],
        partial(run, name),
        partial(names, name),
        partial(table, name),
        partial(verdicts, name),
        has_engines=True,
    )
    for name in CONTESTS
}
