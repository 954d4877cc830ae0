"""Measures the accuracy of policies on checkable problems, through the OpenAI API.

    python -m benchmarks.accuracy --policies full streaming tova snapkv ams-tova \
        --budgets 96 128 192 --tasks recall:60 copy:40 --n 200 --out accuracy.jsonl
    python -m benchmarks.accuracy --grid benchmarks/grids/standard.yaml --shard 1/4

Servers run one after the other, one per budget, interval and tier (heads of equal or of
different lengths). Requests name their policies, and one task of one policy runs at a
time. `full` is vLLM without a policy and has neither budget nor interval. With the same
settings the command continues where the output file ends. A summary goes to standard
output and to OUT.summary.json.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import provenance
from benchmarks.accuracy import grid, measured, pairs, results, scoring, summary
from benchmarks.accuracy.client import Asked, Client
from benchmarks.accuracy.questions import check_task
from benchmarks.accuracy.servers import (
    DTYPE,
    OWN_DTYPE,
    Setup,
    count_events,
    serving,
    split,
)
from benchmarks.load import LoadError
from benchmarks.printing import log
from benchmarks.serving import PACKAGED_MODEL
from benchmarks.workload import VALUE_BYTES, group_size
from vllm_kvpolicy.commands.outputs import new_file, new_folder
from vllm_kvpolicy.compat import FLOAT8_CACHES
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE
from vllm_kvpolicy.policies.names import parse, parts

DEFAULT_TASKS = ["recall:60", "copy:40", "hot:40", "sub:30"]
NOT_IN_GRIDS = {"grid", "shard", "dry_run", "out", "logs", "url", "data", "trace"}

LOG_SECONDS = 30.0
"""Between two states of the progress bar where nobody looks at it."""

Line = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """Return the parser; every option except NOT_IN_GRIDS may stand in a grid."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__.partition("\n")[0]
    )
    add = made.add_argument
    add("--grid", type=Path, help="YAML file with values for the options below")
    add("--shard", type=shard, default=(1, 1), metavar="I/N", help="part I of N")
    add("--dry-run", action="store_true", help="only print how long it would take")
    add("--model", type=Path, default=PACKAGED_MODEL, help="a folder")
    add("--url", help="root of a running server; none is started")
    add("--served-name", default="model", help="the server's name of the model")
    add(
        "--serve-args", default="", help="more arguments of `vllm serve`, as one string"
    )
    add("--dtype", choices=VALUE_BYTES, default=DTYPE, help="of the model")
    add(
        "--kv-cache-dtype",
        choices=[OWN_DTYPE, *FLOAT8_CACHES],
        default=OWN_DTYPE,
        help="of keys and values in the cache",
    )
    add("--policies", nargs="+", metavar="NAME")
    add("--budgets", nargs="+", type=int, default=[128], help="tokens")
    add("--intervals", "--interval", nargs="+", type=int, default=[64], help="tokens")
    add(
        "--policy-config",
        type=json.loads,
        default={},
        metavar="JSON",
        help="options; each server gets those of its policies",
    )
    add(
        "--variants",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further options by variant, for policies written NAME:VARIANT",
    )
    add(
        "--events",
        choices=(ALWAYS, PRESSURE),
        default=ALWAYS,
        help="at fixed positions, or when the pool runs short",
    )
    add(
        "--pool-tokens",
        type=int,
        help="of each server, at the model's dtype; default: room for all",
    )
    add(
        "--evict-prompts",
        action="store_true",
        help="no policy protects the prompt, so that all hold equally much",
    )
    add(
        "--keep-prompts",
        action="store_true",
        help="every policy protects the prompt; budgets count generated tokens",
    )
    _add_asking(made)
    return made


def _add_asking(made: argparse.ArgumentParser) -> None:
    """Add the options of problems, of requests and of where results go."""
    add = made.add_argument
    add("--tasks", nargs="+", default=DEFAULT_TASKS, help="see docs/accuracy.md")
    add("--data", type=Path, default=Path("data"), help="folder of local JSONL files")
    add("--n", type=int, default=200, help="problems per task")
    add("--seed", type=int, default=0, help="seed of the first generated problem")
    add("--samples", type=int, default=1, help="answers to each problem")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add(
        "--max-tokens",
        type=int,
        help="most tokens of an answer; default: the task's limit",
    )
    add("--max-trace", type=int, help="most tokens of a worked answer")
    add("--max-model-len", type=int, default=4096, help="tokens")
    add("--block-size", type=int, default=32, help="tokens")
    add("--concurrency", type=int, default=16, help="requests at once")
    add("--timeout", type=float, default=600.0, help="seconds for one try")
    add("--tries", type=int, default=5, help="tries of one request")
    add("--math-verify", action="store_true", help="judge LaTeX with math-verify, too")
    add("--out", type=new_file, default=Path("accuracy.jsonl"))
    add("--logs", type=new_folder, help="folder for the servers' logs")
    add("--trace", type=Path, help="folder in which servers record what events keep")


def shard(text: str) -> tuple[int, int]:
    """Read `I/N`."""
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N, 1 <= I <= N, got {text!r}")
    return int(part), int(parts)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, which wins over a grid."""
    made = parser()
    args = made.parse_args(argv)
    try:
        if args.grid:
            known = set(vars(args)) - NOT_IN_GRIDS
            made.set_defaults(**grid.read_grid(args.grid, known))
            args = made.parse_args(argv)
            args.model = Path(args.model)
        check(args)
    except ValueError as error:
        made.error(str(error))
    if args.shard[1] > 1:
        suffix = f".{args.shard[0]}-of-{args.shard[1]}{args.out.suffix}"
        args.out = args.out.with_suffix(suffix)
    return args


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if values are invalid, alone or together."""
    if not args.policies:
        raise ValueError("policies: expected at least one, got none")
    for task in args.tasks:
        check_task(task)
    for name in ("n", "samples", "concurrency", "tries"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(args, name)}")
    if args.samples > 1 and not args.temperature:
        raise ValueError("samples: expected --temperature above 0 beside several")
    prompts = args.evict_prompts, args.keep_prompts
    if all(prompts):
        raise ValueError("keep-prompts: expected no --evict-prompts beside it")
    if args.events == PRESSURE and args.pool_tokens is None:
        raise ValueError("events: with room for all nothing is cut, name --pool-tokens")
    if args.pool_tokens is not None and args.pool_tokens < args.max_model_len:
        raise ValueError(
            f"pool-tokens: got {args.pool_tokens}, expected at least the "
            f"{args.max_model_len} of --max-model-len"
        )
    own = args.policy_config, args.variants, *prompts, args.serve_args
    if args.url and any((*own, args.trace, *unusual(args))):
        raise ValueError(
            "url: expected no --policy-config, --variants, --evict-prompts, "
            "--keep-prompts, --dtype, --kv-cache-dtype, --events, --pool-tokens, "
            "--serve-args or --trace, which are that server's own"
        )
    known = {key for name in parts() for key in parse(name).options}
    if unknown := sorted(args.policy_config.keys() - known):
        raise ValueError(
            f"policy-config: expected options of policies, got {unknown}; "
            "docs/support.md lists them"
        )
    asked = [split(label) for label in args.policies if ":" in label]
    if {variant for _, variant in asked} != args.variants.keys():
        raise ValueError(
            f"variants: expected {sorted({variant for _, variant in asked})}, which "
            f"--policies name, got {sorted(args.variants)}"
        )
    for name, variant in asked:
        known = parse(name).options
        if unknown := sorted(args.variants[variant].keys() - known):
            raise ValueError(
                f"variants: expected options of {name} in {variant}, got {unknown}; "
                "docs/support.md lists them"
            )


def check_servers(args: argparse.Namespace) -> None:
    """Raise ValueError if a server of the run, or its requests, would be refused.

    Servers that get more flags by `--serve-args` check theirs themselves.
    """
    if not (args.url or args.serve_args):
        for setup in grid.setups_of(args.policies, args.budgets, args.intervals):
            setup.check(args)


def unusual(args: argparse.Namespace) -> Line:
    """Return the dtypes, events and pool that are not the usual ones."""
    usual = {"dtype": DTYPE, "kv_cache_dtype": OWN_DTYPE}
    usual |= {"events": ALWAYS, "pool_tokens": None}
    found = {key: v for key in usual if (v := getattr(args, key)) != usual[key]}
    # What is called for depends on who else runs.
    return found | ({"concurrency": args.concurrency} if "events" in found else {})


def settings_of(args: argparse.Namespace, judge: str | None) -> Line:
    """Return the settings that all lines of a file share.

    Args:
        judge: version of math-verify, None if it is not used.
    """
    weights = args.model / "model.safetensors"
    known = not args.url and weights.is_file()
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if known else None
    return {
        "model": args.served_name if args.url else args.model.name,
        "model_sha256": digest,
        "group_size": None if args.url else group_size(args.model),
        "own_server": not args.url,
        "serve_args": args.serve_args,
        "policy_config": args.policy_config,
        "variants": args.variants,
        "evict_prompts": args.evict_prompts,
        "keep_prompts": args.keep_prompts,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "max_model_len": args.max_model_len,
        "block_size": args.block_size,
        "math_verify": judge,
        **unusual(args),
    }


def run(
    args: argparse.Namespace,
    client: Client,
    wanted: dict[Setup, list[Asked]],
    lines: list[Line],
    log_folder: Path,
    is_warm: bool = False,
) -> tuple[dict[str, float], list[str]]:
    """Send each server the requests that the output file lacks, after a warm-up.

    Args:
        lines: of the output file; new ones are added, here and in the file.
        is_warm: see `ask_batches`.

    Returns:
        Server -> events that it counted; and a sentence per failed problem.

    Raises:
        LoadError: too many problems failed, or the server of `--url` has no policies.
    """
    events: dict[str, float] = {}
    failures: list[str] = []
    total = sum(map(len, wanted.values()))
    interval = 0.5 if sys.stderr.isatty() else LOG_SECONDS
    with (
        tqdm(total=total, unit="answer", mininterval=interval) as bar,
        args.out.open("a", encoding="utf-8") as file,
    ):

        def put(row: Line) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        def write(line: Line) -> None:
            put(line)
            lines.append(line)
            bar.update()

        for setup, asked in wanted.items():
            bar.set_description(setup.label)
            log(f"{setup.label}: {len(asked)} answers to come")
            with serving(setup, args, log_folder) as url:
                asyncio.run(client.ask_all(url, asked[:1], _forget))
                before = count_events(url, setup)
                failed: list[str] = []
                for batch in ask_batches(client, url, asked, write, failed, is_warm):
                    put({results.BATCH: batch})
                failures += failed
                after = count_events(url, setup)
            if before is not None and after is not None:
                events[setup.label] = after - before
                log(f"{setup.label}: {after - before:.0f} events")
    return events, failures


def ask_batches(
    client: Client,
    url: str,
    asked: Sequence[Asked],
    write: Callable[[Line], None],
    failures: list[str],
    is_warm: bool,
) -> Iterator[Line]:
    """Send requests by policy and task; yield what the server measured for each.

    Args:
        asked: requests, those of a policy and a task together.
        write: called with each line when it is known.
        failures: a sentence for each problem that failed is added.
        is_warm: all of a batch is asked once before, so that a prefix cache has it.

    Raises:
        LoadError: too many failed.
    """
    for place, members in groupby(asked, key=lambda one: measured.place_of(one.key)):
        batch = list(members)

        def ask(batch: list[Asked] = batch) -> list[Line]:
            lines: list[Line] = []

            def take(line: Line) -> None:
                write(line)
                lines.append(line)

            asyncio.run(client.ask_all(url, batch, take, failures))
            return lines

        if is_warm:
            asyncio.run(client.ask_all(url, batch, _forget))
        clients = min(client.concurrency, len(batch))
        found = measured.measure(url, place, clients, ask)
        if found["answers"]:
            yield found


def folder_of(args: argparse.Namespace) -> Path:
    """Return the folder for the servers' logs, made if it is not there."""
    folder = args.logs or Path(tempfile.mkdtemp(prefix="kvpolicy-accuracy-"))
    folder.mkdir(parents=True, exist_ok=True)
    log(f"logs in {folder}")
    return folder


def client_of(args: argparse.Namespace, equal: Any = None) -> Client:
    """Return the client that a command line asks for; see `Client`."""
    return Client(
        concurrency=args.concurrency,
        timeout=args.timeout,
        tries=args.tries,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        model=args.served_name,
        equal=equal,
    )


def _forget(_: Line) -> None:
    """Ignore the line of a warm-up request."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the accuracy of each policy; return 1 if a problem failed."""
    args = parse_args(argv)
    check_servers(args)
    version, equal = scoring.math_verify() if args.math_verify else (None, None)
    questions = grid.read_questions(args)
    cells = grid.shard_of(grid.cells_of(args), questions, *args.shard)
    settings = settings_of(args, version)
    lines = [] if args.dry_run else results.continue_file(args.out, settings)
    digests = {(q.task, q.id): q.digest for some in questions.values() for q in some}
    results.check_digests(lines, digests)
    done = {results.key_of(line) for line in lines}
    wanted = grid.asked_of(cells, questions, args.samples, done, bool(args.url))
    answers, seconds = grid.estimate(wanted, lines, args.concurrency)
    log(
        f"{args.out}: {answers} answers to come on {len(wanted)} servers, "
        f"{len(lines)} there; about {seconds / 60:.0f} minutes"
    )
    if args.dry_run:
        return 0
    record: Line = {"provenance": provenance.collect("benchmarks.accuracy")}
    folder, client = folder_of(args), client_of(args, equal)
    events, failures = run(args, client, wanted, lines, folder)
    record |= {"events_in_this_run": events, "failures_in_this_run": failures}
    batches = results.batches_of([args.out])
    record |= {"settings": settings, **summary.summarise(lines, settings, batches)}
    print(summary.format_summary(record["summary"]))
    print("\n" + pairs.format_pairs(record["pairs"]))
    args.out.with_suffix(".summary.json").write_text(
        json.dumps(record, indent=2) + "\n", encoding="utf-8"
    )
    for failure in failures:
        log(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LoadError, ValueError) as error:
        sys.exit(f"benchmarks.accuracy: {error}")
