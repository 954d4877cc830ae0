"""Measures policies with a pretrained language model.

    python -m benchmarks.language --quick
    python -m benchmarks.language --grid benchmarks/grids/language/losses.yaml
    python -m benchmarks.language --record FILE.jsonl ... --out RECORD.json

The model is SmolLM2 135M unless --model names another; the first run fetches it and the
texts (docs/language.md). A run continues where its output file ends. The last form
makes a record for benchmarks/results of one or several output files.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import packed, pretrained
from benchmarks.accuracy.grid import read_grid
from benchmarks.accuracy.results import Line, continue_file
from benchmarks.accuracy.servers import FULL, OWN_DTYPE, split
from benchmarks.language import record
from benchmarks.language.engines import Settings
from benchmarks.language.parts import PARTS, Item
from benchmarks.language.runs import Work, run
from benchmarks.language.texts import encoder_of, read_texts
from benchmarks.pinned import PinnedError
from benchmarks.printing import table
from vllm_kvpolicy.commands.outputs import new_file
from vllm_kvpolicy.compat import FLOAT8_CACHES
from vllm_kvpolicy.config_keys import ALWAYS, DEFAULT_RECENT, PRESSURE
from vllm_kvpolicy.policies.names import parse

NOT_IN_GRIDS = {"grid", "out", "record", "dry_run", "quick", "model", "trace"}
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
"""Room behind the longest prompt."""


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
    add("--out", type=new_file, default=Path("runs/language.jsonl"))
    add("--model", type=Path, help="folder; default: SmolLM2 135M in the user's cache")
    add("--dtype", default="bfloat16", help="of weights, keys and values")
    add(
        "--kv-cache-dtype",
        default=OWN_DTYPE,
        choices=[OWN_DTYPE, *FLOAT8_CACHES],
        help="of keys and values in the cache",
    )
    add("--parts", nargs="+", choices=PARTS, default=["losses"])
    add(
        "--policies",
        nargs="+",
        default=[],
        metavar="NAME",
        help="`full` always runs, but for `load`",
    )
    add("--budgets", nargs="+", type=int, default=[512], help="tokens per KV head")
    add("--intervals", nargs="+", type=int, default=[256], help="tokens")
    add("--texts", type=int, default=36, help="texts, or problems of each kind")
    add(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help="novel, lookup-4096, ...; default: all",
    )
    add("--text-tokens", type=int, default=4096, help="length of each text")
    told = "newest tokens that stay in any case: of gates, the window of their training"
    add("--recent", type=int, default=DEFAULT_RECENT, help=told)
    add("--at-once", type=int, default=4, help="requests in an engine step")
    add("--events", choices=(ALWAYS, PRESSURE), default=ALWAYS, help="of `load`")
    add("--pool-share", type=float, help="of what all at once need, of `load`")
    add("--policy-config", type=json.loads, default={}, metavar="JSON")
    add("--variants", type=json.loads, default={}, metavar="JSON")
    add("--trace", type=Path, help="folder in which engines record what events keep")
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
    engines = {(PARTS[part].as_served, PARTS[part].is_crowded) for part in args.parts}
    if len(engines) > 1:
        raise ValueError(f"parts: got {args.parts}, expected `turns` or `load` alone")
    ((_, is_crowded),) = engines
    if is_crowded != (args.pool_share is not None):
        raise ValueError("pool-share: expected with `--parts load`, and only there")
    if args.events == PRESSURE and not is_crowded:
        raise ValueError("events: with room for all nothing is cut, see `--parts load`")
    for name in ("texts", "at_once"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(args, name)}")


def summary(lines: Sequence[Line]) -> str:
    """Return the means of an output file, beside those of full KV, as tables."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in record.rows_of(lines):
        parts.setdefault(row["part"], []).append(row)
    return "\n\n".join(_means(part, rows) for part, rows in parts.items())


def _means(part: str, rows: Sequence[dict[str, Any]]) -> str:
    names = PARTS[part].names
    full = {
        (row["budget"], row["interval"]): row for row in rows if row["policy"] == FULL
    }
    printed = []
    for row in sorted(rows, key=lambda row: (row["budget"], row["interval"])):
        place = row["budget"], row["interval"]
        cells = [row["policy"], *map(str, place), str(len(row["ids"]))]
        for name in names:
            mean, base = fmean(row[name]), full.get(place, {}).get(name)
            cells += [f"{mean:.3f}", f"{mean - fmean(base):+.3f}" if base else "-"]
        printed.append(cells)
    columns = [word for name in names for word in (name, "beside full")]
    return table([part, "budget", "interval", "items", *columns], printed)


def read(args: argparse.Namespace) -> tuple[Settings, dict[str, list[Any]]]:
    """Fetch the model and the texts unless the cache has them.

    Returns:
        What all engines have in common, and the items of each part.

    Raises:
        ValueError: the model's tokenizer is another one, or a text is too short.
        PinnedError: a package cannot be had.
        PretrainedError: the model's folder holds something else.
    """
    model = args.model or pretrained.make(pretrained.default_folder())
    encode, first = encoder_of(model)
    cache = pretrained.default_folder().parent
    texts = read_texts(encode, first, args.text_tokens, cache)
    wanted = encode, texts, args.texts, args.kinds or ()
    items = {part: PARTS[part].items(*wanted) for part in args.parts}
    if args.kinds:
        items = of_kinds(items, args.kinds)
    most = max(map(len, items.values()))
    if args.pool_share is not None and most % args.at_once:
        raise ValueError(
            f"at-once: got {args.at_once}, expected a divisor of {most}, the requests, "
            "so that the pool is as small for all of them"
        )
    longest = max(len(item.token_ids) for some in items.values() for item in some)
    settings = Settings(
        model=model,
        dtype=args.dtype,
        max_model_len=longest + EXTRA_TOKENS,
        at_once=args.at_once,
        budgets=tuple(args.budgets),
        intervals=tuple(args.intervals),
        policy_config=args.policy_config,
        variants=args.variants,
        as_served=any(PARTS[part].as_served for part in args.parts),
        events=args.events,
        pool_share=args.pool_share,
        trace=args.trace,
        kv_cache_dtype=args.kv_cache_dtype,
        recent=args.recent,
    )
    return settings, items


def of_kinds(
    items: Mapping[str, Sequence[Item]], kinds: Sequence[str]
) -> dict[str, list[Item]]:
    """Return the items of some kinds, by part.

    Raises:
        ValueError: a kind that no item of any part has.
    """
    known = {item.kind for some in items.values() for item in some}
    if unknown := sorted(set(kinds) - known):
        raise ValueError(f"kinds: got {unknown}, expected some of {sorted(known)}")
    return {
        part: [item for item in some if item.kind in kinds]
        for part, some in items.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse_args(argv)
    try:
        if args.record:
            packed.write_text(args.out, record.compact(record.of_files(args.record)))
            return
        settings, items = read(args)
        recorded = settings.recorded()
        work = Work(items, continue_file(args.out, recorded))
        run(args.policies, settings, work, None if args.dry_run else args.out)
        lines = continue_file(args.out, recorded)
    except (ValueError, PinnedError, pretrained.PretrainedError) as error:
        sys.exit(f"language: {error}")
    if lines and not args.dry_run:
        print(summary(lines))


if __name__ == "__main__":
    main()
