"""Runs the harness' questions on kvpress, one at a time, and on our server.

    python -m benchmarks.peer setup
    python -m benchmarks.peer ask --budgets 192 --n 6
    python -m benchmarks.peer ours --budgets 192 --n 6 --concurrencies 1 16
    python -m benchmarks.peer losses

`setup` makes the peer's environment in runs/peer-venv. `ask` writes FOLDER/peer.jsonl
and `ours` FOLDER/ours-C.jsonl, a line per answer, and continue where those end. Both
write the record of the peer's file and of ours at the concurrencies named last. All
other options are those of benchmarks.accuracy except UNUSED. Defaults are the standard
grid, 6 problems per task and a budget of 192; policies are those that kvpress has a
press for. `losses` writes FOLDER/losses.jsonl and its record; its other options are
those of benchmarks.language, see `losses`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import packed, provenance
from benchmarks.accuracy import __main__ as harness
from benchmarks.accuracy import grid, results, scoring
from benchmarks.language import __main__ as language
from benchmarks.load import LoadError
from benchmarks.peer import asking, environment, facts, losses, ours, process, record
from benchmarks.peer.catalogue import FULL, PRESSES, SORTED, rows_of
from benchmarks.peer.process import PeerError, Worker
from benchmarks.peer.prompts import Prompts
from benchmarks.printing import log
from vllm_kvpolicy.commands.outputs import new_file, new_folder

GRID = provenance.ROOT / "benchmarks" / "grids" / "standard.yaml"
DEFAULTS = ["--grid", str(GRID), "--n", "6", "--budgets", "192", "--variants", "{}"]
DEFAULTS += ["--policies", FULL, *PRESSES]
_UNUSED = {"out", "concurrency", "logs", "url", "served_name", "shard", "trace"}
_UNUSED |= {"dtype", "kv_cache_dtype", "events", "pool_tokens"}
UNUSED = {
    "ask": _UNUSED | {"serve_args", "timeout", "tries"},
    "ours": _UNUSED,
    "losses": {"at_once", "dry_run", "out", "parts", "quick", "variants"},
}
"""Options that a command would not look at: of benchmarks.accuracy, for `losses` of
benchmarks.language."""

Line = dict[str, Any]


def parse_args(
    argv: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Read the command line; return our own options and those of the harness."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.peer",
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("setup", help="make the peer's environment")
    ask = commands.add_parser(
        "ask", help="run questions on kvpress", allow_abbrev=False
    )
    ask.add_argument("--python", type=Path, default=environment.PYTHON)
    ask.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    ask.add_argument("--threads", type=int, default=1, help="threads of the peer")
    own = commands.add_parser(
        "ours", help="run questions on our server", allow_abbrev=False
    )
    own.add_argument("--concurrencies", nargs="+", type=int, default=[1, 16])
    texts = commands.add_parser(
        "losses", help="predict texts behind one compression", allow_abbrev=False
    )
    texts.add_argument("--python", type=Path, default=environment.PYTHON)
    texts.add_argument("--threads", type=int, default=1, help="threads of the peer")
    for command, name in ((ask, "record"), (own, "record"), (texts, "losses")):
        command.add_argument("--folder", type=new_folder, default=Path("runs/peer"))
        command.add_argument(
            "--record", type=new_file, help=f"default: FOLDER/{name}.json"
        )
        command.set_defaults(record_name=f"{name}.json")
    args, rest = made.parse_known_args(argv)
    if args.command == "setup":
        if rest:
            made.error(f"setup: expected no options, got {rest}")
        return args, argparse.Namespace()
    args.record = args.record or args.folder / args.record_name
    made_of, defaults, checked = harness, DEFAULTS, check
    if args.command == "losses":
        made_of, defaults, checked = language, losses.DEFAULTS, losses.check
    try:
        check_used(args.command, made_of.parser(), rest)
        asked = made_of.parse_args([*defaults, *rest])
        checked(asked)
    except ValueError as error:
        made.error(str(error))
    return args, asked


def check_used(
    command: str, made: argparse.ArgumentParser, words: Sequence[str]
) -> None:
    """Raise ValueError for options of a parser that the command does not use."""
    absent = object()
    made.set_defaults(**dict.fromkeys(vars(made.parse_args([])), absent))
    values = vars(made.parse_args(words))
    given = {name for name, value in values.items() if value is not absent}
    if unused := sorted(given & UNUSED[command]):
        options = [f"--{name.replace('_', '-')}" for name in unused]
        raise ValueError(f"{command}: expected no {', '.join(options)}, it has no use")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if the harness' options do not fit a peer."""
    rows_of(args.policies)
    if args.samples > 1 or args.temperature:
        raise ValueError(
            "peer: expected one greedy answer per question, got --samples or "
            "--temperature"
        )
    if not args.evict_prompts:
        raise ValueError("peer: expected --evict-prompts, kvpress protects no prompt")


def ask(args: argparse.Namespace, asked: argparse.Namespace) -> int:
    """Run the questions on the peer that its file lacks."""
    from transformers import AutoTokenizer

    judge, equal = scoring.math_verify() if asked.math_verify else (None, None)
    questions = grid.read_questions(asked)
    if asked.dry_run:
        announce(args, *asking.estimate(asking.wanted_of(asked, questions, ()), []))
        return 0
    prompts = Prompts(AutoTokenizer.from_pretrained(asked.model))
    worker_settings = {
        "model": str(asked.model.resolve()),
        "dtype": args.dtype,
        "threads": args.threads,
    }
    refused: dict[facts.Place, str] = {}
    path = args.folder / "peer.jsonl"
    with Worker(process.command(args.python), worker_settings) as worker:
        settings = harness.settings_of(asked, judge) | {
            "variants": {SORTED: {}},
            "own_server": False,
            "dtype": args.dtype,
            "threads": args.threads,
            "peer": worker.versions,
            "press_options": asking.options_of(asked),
        }
        lines = results.continue_file(path, settings)
        wanted = asking.wanted_of(asked, questions, done_of(lines, questions))
        announce(args, *asking.estimate(wanted, lines))
        new = asking.ask_all(worker, asked, prompts, wanted, equal, refused)
        lines += asking.append(path, new)
    for (row, budget, _), message in refused.items():
        log(f"{row}: refused at {budget}: {message}")
    settings = record.read(path)[0]
    earlier = facts.read(args.folder).get("ask", {})
    known = earlier["refused"] if earlier.get("settings") == settings else []
    places = {facts.place_of(one) for some in wanted.values() for one, _ in some}
    holding = facts.merged(known, refused, places, lines)
    keep_facts(args, settings=settings, refused=holding)
    return 0


def measure(args: argparse.Namespace, asked: argparse.Namespace) -> int:
    """Run the questions on our server that its files lack; return 1 if some failed."""
    judge, equal = scoring.math_verify() if asked.math_verify else (None, None)
    questions = grid.read_questions(asked)
    asked.concurrency = max(args.concurrencies)
    if asked.dry_run:
        done: dict[int, set[tuple]] = {c: set() for c in args.concurrencies}
        announce(args, *ours.estimate(ours.wanted_of(asked, questions, done)))
        return 0
    settings = harness.settings_of(asked, judge) | {"dtype": ours.DTYPE}
    files = {c: args.folder / f"ours-{c}.jsonl" for c in sorted(args.concurrencies)}
    done = {
        concurrency: done_of(results.continue_file(path, settings), questions)
        for concurrency, path in files.items()
    }
    wanted = ours.wanted_of(asked, questions, done)
    announce(args, *ours.estimate(wanted))
    failures = ours.measure(asked, wanted, files, equal, args.folder)
    for failure in failures:
        log(f"failed: {failure}")
    keep_facts(args, concurrencies=sorted(files))
    return 1 if failures else 0


def announce(args: argparse.Namespace, answers: int, seconds: float) -> None:
    """Print how many answers are missing and the estimated time."""
    log(f"{args.folder}: {answers} answers to come, about {seconds / 60:.0f} minutes")


def done_of(lines: list[Line], questions: grid.Questions) -> set[tuple]:
    """Return the keys of lines, after checking that they answer these questions."""
    digests = {(q.task, q.id): q.digest for some in questions.values() for q in some}
    results.check_digests(lines, digests)
    return {results.key_of(line) for line in lines}


def keep_facts(args: argparse.Namespace, **more: Any) -> None:
    """Store facts that output files lack, and write the record."""
    known = facts.read(args.folder)
    made = {"provenance": provenance.collect("benchmarks.peer"), **more}
    facts.write(args.folder, known | {args.command: made})
    whole = record.assemble(args.folder, known | {args.command: made})
    packed.write_text(args.record, json.dumps(whole, indent=1) + "\n")
    log(f"wrote {args.record}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    args, asked = parse_args(argv)
    if args.command == "setup":
        environment.set_up()
        return 0
    commands = {"ask": ask, "ours": measure, "losses": losses.run}
    return commands[args.command](args, asked)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LoadError, PeerError, ValueError) as error:
        sys.exit(f"benchmarks.peer: {error}")
