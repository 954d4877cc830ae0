"""Runs parts of the GPU benchmark.

    python -m benchmarks.gpu min
    python -m benchmarks.gpu c d --out runs/gpu

Each part writes OUT/gpu-PART.json after every single measurement and goes on where it
stopped when it is run again. Ends with a short table; status 1 if anything failed or is
left to measure.
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

from benchmarks.gpu import (  # noqa: E402
    admission_part,
    decode_part,
    event_part,
    growth_part,
    kernel_part,
    layout_part,
    serving_parts,
)
from benchmarks.gpu.models import SHAPES  # noqa: E402
from benchmarks.gpu.plan import TINY, Options, Part  # noqa: E402
from benchmarks.gpu.record import ROOT, Record  # noqa: E402
from benchmarks.printing import table  # noqa: E402
from vllm_kvpolicy.commands.outputs import new_folder

PARTS: dict[str, Part] = {
    **serving_parts.PARTS,
    **decode_part.PARTS,
    **event_part.PARTS,
    **kernel_part.PARTS,
    **growth_part.PARTS,
    **layout_part.PARTS,
    **admission_part.PARTS,
}
SECONDS = 480.0
OUT = ROOT / "benchmarks" / "results" / "gpu"


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    summaries = "\n".join(f"  {name:8} {part.summary}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog=f"parts:\n{summaries}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--model", default="llama-3.1-8b", choices=SHAPES)
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
        "--rehearse",
        action="store_true",
        help="without a GPU: engines that only seem to run, tiny operations; plans, "
        "records and tables are the real ones, figures mean nothing",
    )
    return parser.parse_args(arguments)


def run_part(name: str, options: Options, out: Path) -> bool:
    """Run a part and print its table; return whether all of it is measured."""
    part = PARTS[name]
    suffix = "" if options.model == "llama-3.1-8b" else f"-{options.model}"
    path = out / f"gpu-{name}{suffix}.json"
    settings = {"model": options.model, "names": list(part.names(options))}
    if options.is_rehearsal:
        settings["rehearsal"] = True
    record = Record(path, name, settings)
    is_good = True
    try:
        part.run(record, options)
    except Exception:
        traceback.print_exc()
        is_good = False
    if options.is_rehearsal:
        print("\nREHEARSAL: nothing ran on a GPU, figures and verdicts mean nothing")
    header, lines = part.table(record, options)
    print(f"\nPart {name}: {part.summary}\n\n{table(header, lines)}", flush=True)
    verdicts = [each.row() for each in part.verdicts(record, options)]
    if verdicts:
        print(f"\n{table(['figure', 'is', 'target', ''], verdicts)}", flush=True)
    left = [each for each in part.names(options) if each not in record.cells]
    if left:
        print(f"\n{len(left)} of part {name} left, the first is {left[0]!r}: run again")
    return is_good and not left


def main(arguments: list[str] | None = None, settings: dict | None = None) -> int:
    """Run the command; return its exit status.

    Args:
        arguments: words of the command line, by default this process's.
        settings: further arguments of vLLM's LLM, for trials without a GPU.
    """
    args = parse_args(arguments)
    if not (torch.cuda.is_available() or args.rehearse or args.model == TINY):
        print("no NVIDIA GPU: nothing was measured", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.parts:
            model = args.model
            if args.rehearse and not PARTS[name].has_engines:
                model = TINY
            options = Options(
                model, Path(folder), args.seconds, settings or {}, args.rehearse
            )
            results.append(run_part(name, options, args.out))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
