"""Runs vLLM's own tests with our classes in the place of vLLM's, and compares.

    python -m tools.vllm_tests

Fetches vLLM's tests once, runs the files of `chosen` in each of MODES, prints counts by
file, and then what differs from stock vLLM without being in `expected`, and what is
there and differs no longer. Status 1 where there is such a thing.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.vllm_tests import MODES, chosen, compare, hub, source
from tools.vllm_tests.expected import EXPECTED
from tools.vllm_tests.record import Record, read
from tools.vllm_tests.source import FOLDER, ROOT

PYTEST = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider"]
PYTEST += ["-p", "tools.vllm_tests.plugin", "--kv-modes", ",".join(MODES)]
PYTEST += ["--quiet", "--tb=short", "--show-capture=no", "-W", "ignore"]


def main() -> int:
    """Fetch, run, compare; return the status."""
    try:
        source.fetch()
    except ValueError as error:
        print(f"vLLM's tests: {error}", file=sys.stderr)
        return 1
    records: dict[str, dict[str, Record]] = {mode: {} for mode in MODES}
    for name, files in (
        ("configurations", chosen.CONFIGURATIONS),
        ("engines", chosen.ENGINES),
    ):
        hub.make(FOLDER / name, has_weights=name == "engines")
        if status := run(FOLDER / name, files):
            return status
        for mode in MODES:
            records[mode] |= read(FOLDER / name / f"{mode}.jsonl")
    print(*compare.table(records), sep="\n")
    found = compare.problems(records, EXPECTED)
    print(*found or ["all differences are expected"], sep="\n")
    return int(bool(found))


def run(folder: Path, files: Sequence[str]) -> int:
    """Run files in all modes; return pytest's status, 0 where tests fail.

    Args:
        folder: has the model hub, gets the records.
        files: of vLLM's tests.
    """
    paths = os.pathsep.join([str(ROOT), str(FOLDER / "extras")])
    environment = {"PYTHONPATH": paths, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    return subprocess.call(
        [*PYTEST, "--kv-records", str(folder), "--rootdir", str(FOLDER), *files],
        cwd=FOLDER,
        env=os.environ | environment,
    )


if __name__ == "__main__":
    sys.exit(main())
