"""Checks the package on an NVIDIA GPU and measures what it costs and brings there.

    python -m benchmarks.gpu check [--only GROUP ...]
    python -m benchmarks.gpu serving decode --out runs/gpu
    python -m benchmarks.gpu serving --model tiny

A part that measures writes OUT/gpu-PART.json after every single measurement and goes on
where it stopped when it is run again. It ends with a short table. `check` begins anew
each time and adds a line to OUT/gpu-check.jsonl after every check. With the model
`tiny`, for which no GPU is needed, everything is small, figures mean nothing, and
`check` only imports what it would run. Status 1 if anything failed or is left to do, 2
without a GPU.
"""

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks.gpu.engine import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import torch  # noqa: E402

from benchmarks.gpu.check import runner  # noqa: E402
from benchmarks.gpu.contents import DEFAULT_MODEL, PARTS  # noqa: E402
from benchmarks.gpu.models import SHAPES  # noqa: E402
from benchmarks.gpu.parts import TINY, Options  # noqa: E402
from benchmarks.gpu.record import ROOT, Record  # noqa: E402
from benchmarks.printing import table  # noqa: E402
from vllm_kvpolicy.commands.outputs import new_folder

CHECK = "check"
SECONDS = 480.0
OUT = ROOT / "benchmarks" / "results" / "gpu"


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="+", choices=(CHECK, *PARTS), metavar="PART")
    parser.add_argument("--model", default=DEFAULT_MODEL, choices=SHAPES)
    parser.add_argument(
        "--out", type=new_folder, default=OUT, help="folder of the results"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="begin nothing that could take longer than this in all, per part",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(runner.GROUPS),
        choices=runner.GROUPS,
        metavar="GROUP",
        help="groups of checks",
    )
    return parser.parse_args(arguments)


def run_part(name: str, options: Options, out: Path) -> bool:
    """Run a part and print its table; return whether all of it is measured."""
    part = PARTS[name].tiny() if options.is_tiny else PARTS[name]
    suffix = "" if options.model == DEFAULT_MODEL else f"-{options.model}"
    names = part.names(options)
    settings = {"model": options.model, "names": names}
    record = Record(out / f"gpu-{name}{suffix}.json", name, settings)
    is_good = True
    try:
        part.run(record, options)
    except Exception:
        traceback.print_exc()
        is_good = False
    header, lines = part.table(record, options)
    print(f"\nPart {name}\n\n{table(header, lines)}", flush=True)
    verdicts = [each.row() for each in part.verdicts(record, options)]
    if verdicts:
        print(f"\n{table(['figure', 'is', 'target', ''], verdicts)}", flush=True)
    left = [each for each in names if each not in record.cells]
    if left:
        print(f"\n{len(left)} of part {name} left, the first is {left[0]!r}: run again")
    return is_good and not left


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parse_args(arguments)
    if not (torch.cuda.is_available() or args.model == TINY):
        print("no NVIDIA GPU: nothing was measured", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.parts:
            options = Options(args.model, Path(folder), args.seconds)
            if name != CHECK:
                results.append(run_part(name, options, args.out))
            elif options.is_tiny:
                results.append(runner.import_all(args.only))
            else:
                path = args.out / "gpu-check.jsonl"
                results.append(runner.run_all(args.only, args.seconds, path))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
