"""Runs every check that needs an NVIDIA GPU, without pytest: `make gpu-check`.

Groups of checks run in their own processes, a few at a time; each may use the time that
is left. A table of all checks comes last. The status is 1 if a check failed or did not
finish.

    python -m benchmarks.gpu.check [--only NAME ...] [--jobs 4] [--seconds 350]
    python -m benchmarks.gpu.check --rehearse
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.check.groups import GROUPS, REHEARSAL
from benchmarks.gpu.check.runner import Checks, run_all, table
from benchmarks.gpu.record import ROOT, machine
from vllm_kvpolicy.commands.outputs import new_file

SECONDS, JOBS = 350.0, 4
RECORDED = ROOT / "benchmarks" / "results" / "gpu" / "gpu-check.json"


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="groups to run")
    parser.add_argument("--jobs", type=int, default=JOBS, help="groups at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument(
        "--out", type=new_file, help="also write the checks to this file"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="without a GPU: import what groups run, print the recorded checks",
    )
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parse_args(arguments)
    if not (torch.cuda.is_available() or args.rehearse):
        print("no NVIDIA GPU: nothing was checked", file=sys.stderr)
        return 2
    if args.group:
        group = REHEARSAL if args.rehearse else GROUPS[args.group]
        os.environ.update(group.environment)
        group.run(Checks(args.group, args.lines))
        return 0
    known = list(GROUPS)
    names = args.only or known
    if unknown := set(names) - set(known):
        print(f"--only: expected some of {known}, got {unknown}", file=sys.stderr)
        return 2
    started = time.monotonic()
    about = machine()
    command = [sys.executable, "-m", "benchmarks.gpu.check"]
    if args.rehearse:
        command, names = [*command, "--rehearse"], ["rehearsal"]
        print(table(json.loads(RECORDED.read_text())["checks"]))
    lines = run_all(command, names, args.jobs, args.seconds)
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": about, "checks": lines}) + "\n")
    failed = sum(not line["ok"] for line in lines)
    words = [about.get(key) for key in ("gpu", "torch", "vllm", "triton")]
    print(f"\n{' '.join(map(str, words))}\n{table(lines)}")
    print(
        f"{len(lines) - failed} checks passed, {failed} failed, "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
