"""Owns the accuracy of policies on generated problems, through the OpenAI API.

    python -m benchmarks.accuracy --policies full streaming tova snapkv ams-tova \
        --budgets 96 128 192 --tasks recall:60 copy:40 --n 200 --out accuracy.jsonl

One server per budget and tier (heads of equal or of own lengths), one after the other;
requests name their policies. `full` is vLLM without a policy and has no budget. The
output file has a first line with the settings and one line per
problem. Run again with the same settings, it goes on where the file ends. A summary
goes to standard output and to OUT.summary.json.
"""

import argparse
import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import provenance
from benchmarks.load import LoadError, open_session
from benchmarks.server import EngineSettings, running
from benchmarks.serving import PACKAGED_MODEL, log, table
from benchmarks.workload import block_bytes
from reasoner.evaluate import parse_task, wilson
from reasoner.problems import Problem, generate, is_correct
from reasoner.tokenizer import encode
from vllm_kvpolicy.policies.registry import parse

FULL = "full"
CONCURRENCY = 16
BLOCK_TOKENS = 32
PROGRESS_EVERY = 50
EVENTS = "kvpolicy_events_total"
KEY_FIELDS = ("policy", "budget", "family", "lines", "seed")
DEFAULT_TASKS = (("recall", 60), ("copy", 40), ("hot", 40), ("sub", 30))

Line = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """One server: its policies with their budget in tokens, None for FULL."""

    policies: tuple[str, ...]
    budget: int | None

    @property
    def label(self) -> str:
        """Name of the server in its log."""
        if self.budget is None:
            return FULL
        others = f"-and-{len(self.policies) - 1}-more" if self.policies[1:] else ""
        return f"{self.policies[0]}{others}-{self.budget}"

    def arguments(self, args: argparse.Namespace) -> list[str]:
        """Return what follows `vllm serve`: every request has room at full length."""
        blocks = CONCURRENCY * -(-args.max_model_len // BLOCK_TOKENS) + 1
        settings = EngineSettings(
            model=str(args.model),
            max_model_len=args.max_model_len,
            max_num_seqs=CONCURRENCY,
            kv_cache_bytes=blocks * block_bytes(args.model, BLOCK_TOKENS),
        )
        words = [*settings.arguments(), "--block-size", str(BLOCK_TOKENS)]
        words += ["--num-gpu-blocks-override", str(blocks)]
        words += ["--no-enable-prefix-caching"]
        if self.budget is not None:
            first, *others = self.policies
            config = self.config(args) | {"allow": others}
            words += ["--kv-policy", first, "--kv-budget", str(self.budget)]
            words += ["--kv-interval", str(args.interval)]
            words += ["--kv-policy-config", json.dumps(config)]
            if args.evict_prompts:
                additional = {"kv_policy": {"protect_prompt": False}}
                words += ["--additional-config", json.dumps(additional)]
        return words

    def config(self, args: argparse.Namespace) -> Line:
        """Return those of the given options that a policy of this server knows."""
        known = {param.name for name in self.policies for param in parse(name).params}
        return {key: v for key, v in args.policy_config.items() if key in known}


def setups_of(policies: Sequence[str], budgets: Sequence[int]) -> list[Setup]:
    """Return the servers of a run: FULL, then one per budget and tier."""
    tiers: dict[bool, list[str]] = {}
    for name in policies:
        if name != FULL:
            tiers.setdefault(parse(name).ragged, []).append(name)
    full = [Setup((FULL,), None)] if FULL in policies else []
    return full + [
        Setup(tuple(names), budget) for budget in budgets for names in tiers.values()
    ]


def output_limit(problem: Problem) -> int:
    """Return the most tokens that an answer may take: a quarter more than needed."""
    return len(encode(problem.completion)) * 5 // 4 + 32


async def post(session: aiohttp.ClientSession, body: Line) -> Line:
    """Send a request, again where the server had closed the idle connection.

    Raises:
        LoadError: anything but an HTTP 200.
    """
    for is_last in (False, False, True):
        try:
            async with session.post("/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise LoadError(f"HTTP {response.status}: {await response.text()}")
                return await response.json()
        except aiohttp.ServerDisconnectedError:
            if is_last:
                raise
    raise AssertionError("unreachable")


async def ask(
    session: aiohttp.ClientSession,
    problem: Problem,
    max_tokens: int,
    policy: str | None,
) -> Line:
    """Send one problem, greedily decoded, and judge the answer.

    Args:
        session: on the server.
        problem: what to ask.
        max_tokens: of the answer.
        policy: to name in the request, None for a server that has none.

    Returns:
        The part of an output line that depends on the answer.

    Raises:
        LoadError: anything but an HTTP 200.
    """
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": problem.prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    if policy is not None:
        body["vllm_xargs"] = {"kv_policy": policy}
    answer = await post(session, body)
    choice = answer["choices"][0]
    text = choice["message"]["content"] or ""
    return {
        "correct": is_correct(problem, text),
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "output_tokens": answer["usage"]["completion_tokens"],
        "capped": choice["finish_reason"] == "length",
        "expected": problem.answer,
        "text": text,
    }


async def ask_all(
    url: str,
    wanted: Sequence[tuple[Line, Problem]],
    max_tokens: int | None,
    write: Callable[[Line], None],
) -> None:
    """Send all problems, CONCURRENCY at a time, and write each line when it is known.

    Args:
        url: root of the server.
        wanted: key fields of the output line, and the problem.
        max_tokens: of an answer; None for `output_limit`.
        write: called with whole lines, in the order of arrival.
    """
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(key: Line, problem: Problem) -> None:
        async with places:
            limit = max_tokens or output_limit(problem)
            policy = None if key["budget"] is None else key["policy"]
            write(key | await ask(session, problem, limit, policy))

    async with open_session(url) as session, asyncio.TaskGroup() as group:
        for key, problem in wanted:
            group.create_task(one(key, problem))


def key_of(line: Line) -> tuple:
    """Return what makes a line of the output file unique."""
    return tuple(line[field] for field in KEY_FIELDS)


def read_lines(path: Path, settings: Line) -> list[Line]:
    """Return the lines of an earlier run; start the file if there is none.

    A last line that was cut off is dropped.

    Args:
        path: output file.
        settings: of this run.

    Raises:
        ValueError: the file was written with other settings.
    """
    if not path.exists() or not path.stat().st_size:
        path.write_text(json.dumps({"settings": settings}) + "\n")
        return []
    whole = path.read_text().rpartition("\n")[0] + "\n"
    path.write_text(whole)
    first, *lines = map(json.loads, whole.splitlines())
    if first != {"settings": settings}:
        raise ValueError(
            f"{path}: written with {first.get('settings')}, expected {settings}; name "
            "another file or remove this one"
        )
    return lines


def summarise(lines: Sequence[Line]) -> list[Line]:
    """Return one row per policy, budget and family; families pooled under `all`."""
    groups: dict[tuple, list[Line]] = {}
    for is_pooled in (False, True):
        for line in lines:
            family = "all" if is_pooled else f"{line['family']}:{line['lines']}"
            groups.setdefault((line["policy"], line["budget"], family), []).append(line)
    rows = []
    for (policy, budget, family), members in groups.items():
        tried, correct = len(members), sum(line["correct"] for line in members)
        low, high = wilson(correct, tried)
        rows.append(
            {
                "policy": policy,
                "budget": budget,
                "family": family,
                "problems": tried,
                "correct": correct,
                "accuracy": correct / tried,
                "low": low,
                "high": high,
                "mean_prompt_tokens": sum(m["prompt_tokens"] for m in members) / tried,
                "mean_output_tokens": sum(m["output_tokens"] for m in members) / tried,
                "capped": sum(m["capped"] for m in members) / tried,
            }
        )
    return rows


def format_summary(rows: Sequence[Line]) -> str:
    """Return the summary as a Markdown table; shares in per cent."""
    header = ["policy", "budget", "family", "correct", "% [95 % Wilson]"]
    header += ["prompt tokens", "output tokens", "% capped"]
    cells = [
        [
            row["policy"],
            str(row["budget"] or "-"),
            row["family"],
            f"{row['correct']}/{row['problems']}",
            f"{100 * row['accuracy']:.1f} [{100 * row['low']:.1f}, "
            f"{100 * row['high']:.1f}]",
            f"{row['mean_prompt_tokens']:.0f}",
            f"{row['mean_output_tokens']:.0f}",
            f"{100 * row['capped']:.1f}",
        ]
        for row in rows
    ]
    return table(header, cells)


def run(
    args: argparse.Namespace, lines: list[Line], log_folder: Path
) -> dict[str, float]:
    """Ask every server what the output file does not have yet.

    Args:
        args: the parsed command line.
        lines: of the output file; new ones are added, here and in the file.
        log_folder: where the servers' logs go.

    Returns:
        Server -> events that it counted; 0 means that its budget was never reached.
    """
    events: dict[str, float] = {}
    done = {key_of(line) for line in lines}
    seeds = range(args.seed, args.seed + args.n)
    for setup in setups_of(args.policies, args.budgets):
        wanted = []
        for policy, (family, size), seed in product(setup.policies, args.tasks, seeds):
            key = (policy, setup.budget, family, size, seed)
            if key not in done:
                problem = generate(family, size, seed)
                wanted.append((dict(zip(KEY_FIELDS, key, strict=True)), problem))
        log(f"{setup.label}: {len(wanted)} problems to ask")
        if not wanted:
            continue
        arguments = {setup.label: setup.arguments(args)}
        with args.out.open("a") as file, running(arguments, log_folder) as servers:

            def write(line: Line, file=file, setup=setup) -> None:
                file.write(json.dumps(line) + "\n")
                file.flush()
                lines.append(line)
                if len(lines) % PROGRESS_EVERY == 0:
                    log(f"{setup.label}: {len(lines)} lines in {args.out}")

            url = servers[setup.label].url
            asyncio.run(ask_all(url, wanted, args.max_tokens, write))
            if setup.budget is not None:
                events[setup.label] = servers[setup.label].metrics()[EVENTS]
                log(f"{setup.label}: {events[setup.label]:.0f} events")
    return events


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=PACKAGED_MODEL, help="a folder")
    parser.add_argument("--policies", nargs="+", required=True, metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=int, default=[128], help="tokens")
    parser.add_argument(
        "--policy-config",
        type=json.loads,
        default={},
        metavar="JSON",
        help="options; each server gets those that its policies know",
    )
    parser.add_argument(
        "--evict-prompts",
        action="store_true",
        help="no policy protects the prompt, so that all hold the same",
    )
    parser.add_argument("--interval", type=int, default=64, help="tokens")
    parser.add_argument(
        "--tasks",
        nargs="+",
        type=parse_task,
        default=list(DEFAULT_TASKS),
        metavar="FAMILY:LINES",
    )
    parser.add_argument("--n", type=int, default=200, help="problems per task")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    parser.add_argument(
        "--max-tokens", type=int, help="of an answer; default: 1.25 x the worked one"
    )
    parser.add_argument("--max-model-len", type=int, default=4096, help="tokens")
    parser.add_argument("--out", type=Path, default=Path("accuracy.jsonl"))
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure the accuracy of each policy at each budget."""
    args = parse_args(argv)
    weights = (args.model / "model.safetensors").read_bytes()
    settings = {
        "model_sha256": hashlib.sha256(weights).hexdigest(),
        "interval": args.interval,
        "policy_config": args.policy_config,
        "evict_prompts": args.evict_prompts,
        "max_tokens": args.max_tokens,
        "max_model_len": args.max_model_len,
    }
    record: Line = {"provenance": provenance.collect("benchmarks.accuracy")}
    lines = read_lines(args.out, settings)
    log_folder = args.logs or Path(tempfile.mkdtemp(prefix="kvpolicy-accuracy-"))
    log_folder.mkdir(parents=True, exist_ok=True)
    log(f"logs in {log_folder}")
    record["events_in_this_run"] = run(args, lines, log_folder)
    record |= {"settings": settings, "summary": summarise(lines)}
    print(format_summary(record["summary"]))
    args.out.with_suffix(".summary.json").write_text(
        json.dumps(record, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
