"""Runs every check that needs an NVIDIA GPU, without pytest: `make gpu-check`.

Groups of checks run in processes of their own, a few at a time, each with what is left
of the time. A table of all checks comes last; status 1 if any failed, or did not come
to its end.

    python tests/gpu/gpu_check.py [--only NAME ...] [--jobs 4] [--seconds 350]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (ROOT, HERE.parent, HERE):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import torch  # noqa: E402

SECONDS, JOBS = 350.0, 4
GRACE_SECONDS = 5.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "4",  # groups share the cores
}
IEEE = {"TRITON_F32_DEFAULT": "ieee"}  # float32 in vLLM's kernels, not TF32
MAX_DETAIL = 160
Line = dict[str, Any]


class Checks:
    """Collects the outcome of a group's checks, each on disk as soon as it is known.

    Args:
        group: their group.
        path: file of one JSON object per line, appended to.
    """

    def __init__(self, group: str, path: Path) -> None:
        self.group, self.path = group, path

    @contextmanager
    def case(self, name: str) -> Iterator[list[str]]:
        """Run a check: it passes if nothing is raised inside.

        Yields:
            A list for what the check found, for its line of the table.
        """
        started, notes = time.monotonic(), []
        try:
            yield notes
            is_good = True
        except Exception as error:
            traceback.print_exc()
            is_good = False
            notes.insert(0, f"{type(error).__name__}: {error}".splitlines()[0])
        line = {
            "group": self.group,
            "check": name,
            "ok": is_good,
            "seconds": round(time.monotonic() - started, 1),
            "detail": "; ".join(notes),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def groups() -> dict[str, tuple[Callable[[Checks], None], dict[str, str]]]:
    """Return the groups, those that take longest first, and their environment."""
    import gpu_engines
    import gpu_flashinfer
    import gpu_kernels
    import gpu_oracles
    import gpu_syncs

    return {
        "flash": (partial(gpu_engines.check_backend, "FLASH_ATTN"), {}),
        "triton": (partial(gpu_engines.check_backend, "TRITON_ATTN"), IEEE),
        "llama-3.1-8b": (partial(gpu_engines.check_shape, "llama-3.1-8b"), {}),
        "kernels": (gpu_kernels.check_all, {}),
        "pytest": (check_pytest, {}),
        "oracles": (gpu_oracles.check_on_gpu, IEEE),
        "qwen3-8b": (partial(gpu_engines.check_shape, "qwen3-8b"), {}),
        "syncs": (gpu_syncs.check_on_gpu, {}),
        "attention": (check_attention, {}),
        "flashinfer": (gpu_flashinfer.check_engines, {}),
    }


def check_attention(checks: Checks) -> None:
    """Run vLLM's attention kernels over tables of both sorts."""
    import attention_oracles
    import folded_oracles

    attention_oracles.check_on_gpu(checks)
    folded_oracles.check_on_gpu(checks)


def check_pytest(checks: Checks) -> None:
    """Run the tests of this folder, where pytest is installed."""
    with checks.case("tests/gpu") as notes:
        command = [sys.executable, "-m", "pytest", "-q", str(HERE)]
        try:
            import pytest  # noqa: F401
        except ImportError:
            notes.append("NOT RUN: pytest is not installed")
            return
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        notes.append(done.stdout.strip().splitlines()[-1])
        assert done.returncode == 0, "pytest failed"


def run_group(
    command: Sequence[str], name: str, folder: Path, end: float
) -> list[Line]:
    """Run a group in a process of its own; return its checks.

    Args:
        command: runs a group; gets `--group NAME --lines FILE`.
        name: of the group.
        folder: for its file.
        end: when it must have ended, in seconds of `time.monotonic`.
    """
    path, started = folder / f"{name}.jsonl", time.monotonic()
    problem = None
    if started >= end:
        problem = "not begun: out of time"
    else:
        words = [*command, "--group", name, "--lines", str(path)]
        try:
            status = subprocess.run(words, cwd=ROOT, timeout=end - started).returncode
        except subprocess.TimeoutExpired:
            problem = f"cut off after {time.monotonic() - started:.0f} s"
        else:
            problem = f"its process ended with status {status}" if status else None
    written = path.read_text().splitlines() if path.exists() else []
    lines = [json.loads(line) for line in written]
    if problem is None and not lines:
        problem = "it checked nothing"
    if problem is not None:
        seconds = round(time.monotonic() - started, 1)
        line = {"group": name, "check": "the whole group", "ok": False}
        lines.append(line | {"seconds": seconds, "detail": problem})
    return lines


def run_all(
    command: Sequence[str], names: Sequence[str], jobs: int, seconds: float
) -> list[Line]:
    """Run groups side by side; return all checks, group by group."""
    end = time.monotonic() + seconds - GRACE_SECONDS
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(max_workers=jobs) as pool,
    ):
        run = partial(run_group, command, folder=Path(folder), end=end)
        found = pool.map(run, names)
        return [line for lines in found for line in lines]


def table(lines: Sequence[Line]) -> str:
    """Return the checks as lines of text."""
    rows = [
        (
            "ok  " if line["ok"] else "FAIL",
            line["group"],
            line["check"],
            f"{line['seconds']:.1f} s",
            line["detail"][:MAX_DETAIL],
        )
        for line in lines
    ]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:4]]
    return "\n".join(
        "  ".join([*map(str.ljust, row[:4], widths), row[4]]).rstrip() for row in rows
    )


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="groups to run")
    parser.add_argument("--jobs", type=int, default=JOBS, help="groups at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--out", type=Path, help="also write the checks to this file")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    if not torch.cuda.is_available():
        print("no NVIDIA GPU: nothing was checked", file=sys.stderr)
        return 2
    if args.group:
        check, environment = groups()[args.group]
        os.environ.update(environment)
        check(Checks(args.group, args.lines))
        return 0
    from benchmarks.gpu.record import machine

    known = list(groups())
    names = args.only or known
    if unknown := set(names) - set(known):
        print(f"--only: expected some of {known}, got {unknown}", file=sys.stderr)
        return 2
    started = time.monotonic()
    about = machine()
    command = [sys.executable, str(Path(__file__).resolve())]
    lines = run_all(command, names, args.jobs, args.seconds)
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": about, "checks": lines}) + "\n")
    failed = sum(not line["ok"] for line in lines)
    words = [about[key] for key in ("gpu", "torch", "vllm", "triton")]
    print(f"\n{' '.join(map(str, words))}\n{table(lines)}")
    print(
        f"{len(lines) - failed} checks passed, {failed} failed, "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
