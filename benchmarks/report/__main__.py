"""Makes tables and figures from result files.

    python -m benchmarks.report merge runs/standard.*-of-4.jsonl --out standard.json.xz
    python -m benchmarks.report trace FOLDER --out traces.json
    python -m benchmarks.report draw standard.json.xz traces.json --output docs/figures
    python -m benchmarks.report pages [--check]

`merge` turns the output of all shards into one summary, `trace` a trace into figures;
both results are small enough to commit to benchmarks/results. `draw` makes a PNG per
figure. `pages` writes the tables of benchmarks/reports and of the other pages that have
some anew, see `tables`; `--check` only tells whether they are up to date.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import packed, provenance
from benchmarks.accuracy import results, summary
from benchmarks.accuracy.groups import POOLED
from benchmarks.report import (
    accuracy_figures,
    panels,
    records,
    tables,
    trace_figures,
    traces,
)
from benchmarks.report.tradeoff_figure import draw_tradeoff
from vllm_kvpolicy.commands.outputs import new_file, new_folder

ROOT = provenance.ROOT
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("*.md", "benchmarks/reports/*.md", "docs/*.md", "reasoner/*.md")
"""Where pages may have tables."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser(
        "merge", help="make one summary of several output files"
    )
    merge.add_argument(
        "files", type=Path, nargs="+", help="output files of benchmarks.accuracy"
    )
    trace = commands.add_parser("trace", help="measure a trace")
    trace.add_argument(
        "folder", type=Path, help="folder that workers recorded in one run"
    )
    for command in (merge, trace):
        command.add_argument(
            "--out", type=new_file, required=True, help="JSON to write"
        )
    draw = commands.add_parser("draw", help="draw figures as PNGs")
    draw.add_argument(
        "files", type=Path, nargs="+", help="made by merge, trace or --record"
    )
    draw.add_argument(
        "--output", type=new_folder, required=True, help="folder for the PNGs"
    )
    draw.add_argument(
        "--about",
        default="",
        metavar="TEXT",
        help="model and task as captions name them (default: the model's name)",
    )
    draw.add_argument(
        "--score",
        choices=records.SCORES,
        default=records.ANSWER,
        help="what figures of answers show (default: %(default)s)",
    )
    pages = commands.add_parser("pages", help="write the tables of all pages")
    pages.add_argument("--check", action="store_true", help="only check, write nothing")
    return parser.parse_args(argv)


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the record of several output files; see `results.merge`.

    Of the paired tests it has those of all tasks together, which tables read.
    """
    settings, lines = results.merge(paths)
    record = {"provenance": provenance.collect("benchmarks.report")}
    found = summary.summarise(lines, settings, results.batches_of(paths))
    found["pairs"] = [pair for pair in found["pairs"] if pair["family"] == POOLED]
    return record | {"settings": settings} | found


def trace(folder: Path) -> dict[str, Any]:
    """Return the record of a trace; see `traces.read_policies`."""
    record = {"provenance": provenance.collect("benchmarks.report")}
    return record | {"policies": traces.read_policies(folder)}


def draw(
    paths: Sequence[Path], output: Path, about: str = "", score: str = records.ANSWER
) -> list[str]:
    """Write the figures of result files and return their names.

    A figure is named by its file and by what it shows. Policies of several traces share
    one set of figures.

    Args:
        paths: written by `merge`, `trace`, or `benchmarks.language --record`; those of
            the last make one figure together.
        about: model and task as captions name them.

    Raises:
        ValueError: a file of another kind or without the score, a policy that two
            traces have, or matplotlib is not installed; nothing is written then.
    """
    drawn: list[tuple[str, Any]] = []
    policies: dict[str, Any] = {}
    languages = []
    for path in paths:
        record = json.loads(packed.read_text(path))
        if "items" in record:
            languages.append(path)
            continue
        if "policies" in record:
            twice = policies.keys() & record["policies"].keys()
            if twice:
                raise ValueError(f"{path}: {sorted(twice)} of another trace, too")
            policies |= record["policies"]
            continue
        named = accuracy_figures.draw_accuracy(records.read(path), about, score)
        drawn += [(f"{packed.name_of(path)}-{name}", figure) for name, figure in named]
    if languages:
        drawn.append(("tradeoff", draw_tradeoff(languages, about)))
    if policies:
        drawn += list(trace_figures.draw_traces(policies, about))
    output.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn:
        panels.save(figure, output / f"{name}.png")
    return [name for name, _ in drawn]


def pages_with_tables() -> list[Path]:
    """Return the pages of the checkout that have tables."""
    found = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    return [page for page in found if tables.BLOCK.search(page.read_text("utf-8"))]


def pages(paths: Sequence[Path], folder: Path, is_check: bool) -> list[Path]:
    """Write the tables of pages and return the pages that changed."""
    changed = []
    for path in paths:
        text = path.read_text("utf-8")
        filled = tables.fill(text, folder)
        if filled != text:
            changed.append(path)
            if not is_check:
                path.write_text(filled, encoding="utf-8")
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if `--check` finds an old table."""
    args = parse_args(argv)
    if args.command == "pages":
        changed = pages(pages_with_tables(), RESULTS, args.check)
        for path in changed:
            print(f"{path}: {'is out of date' if args.check else 'written'}")
        return int(args.check and bool(changed))
    if args.command == "draw":
        names = draw(args.files, args.output, args.about, args.score)
        print(f"{args.output}: {', '.join(names)}")
        return 0
    record = merge(args.files) if args.command == "merge" else trace(args.folder)
    text = json.dumps(record, separators=(",", ":"))
    packed.write_text(args.out, f"{text}\n")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"benchmarks.report: {error}")
