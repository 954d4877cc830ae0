"""Runs vLLM's own tests with our classes in the place of vLLM's, and compares.

    python -m tools.vllm_tests [GROUP ...]

Fetches vLLM's tests once, runs the files of `chosen` in each of MODES, two processes at
a time, prints counts by file, and then what differs from stock vLLM without being in
`expected`, and what is there and differs no longer. Status 1 where there is such a
thing.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tools.vllm_tests import MODES, chosen, compare, hub, source
from tools.vllm_tests.expected import EXPECTED
from tools.vllm_tests.record import Record, read
from tools.vllm_tests.source import FOLDER, ROOT

PROCESSES = 2
PYTEST = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider"]
PYTEST += ["-p", "tools.vllm_tests.plugin", "--rootdir", str(FOLDER), "-W", "ignore"]
PYTEST += ["--quiet", "--show-capture=no", "--tb=short"]
PYTEST += [f"--deselect={test}" for test in chosen.LEFT_OUT]


def main(groups: Sequence[str]) -> int:
    """Fetch, run the tests of some groups or of all, compare; return the status."""
    try:
        source.fetch()
        found: list[str] = []
        for group in groups or chosen.GROUPS:
            hub.make(FOLDER / group, group)
            with ThreadPoolExecutor(PROCESSES) as pool:
                logs = pool.map(lambda mode, group=group: run(group, mode), MODES)
                records = dict(zip(MODES, logs, strict=True))
            print(*compare.table(records), sep="\n")
            found += compare.problems(records, EXPECTED)
    except ValueError as error:
        print(f"vLLM's tests: {error}", file=sys.stderr)
        return 1
    print(*found or ["all differences are expected"], sep="\n")
    return int(bool(found))


def run(group: str, mode: str) -> dict[str, Record]:
    """Run a group of tests in a mode; return their records by test.

    Raises:
        ValueError: pytest did not get to their end.
    """
    home, log = FOLDER / group, FOLDER / group / f"{mode}.jsonl"
    log.write_text("")
    paths = os.pathsep.join([str(ROOT), str(FOLDER / "extras")])
    environment = {"PYTHONPATH": paths, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines that can be looked at
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB, in place of most of the memory
    folders = [os.path.dirname(sys.executable), os.environ["PATH"]]
    environment["PATH"] = os.pathsep.join(folders)  # servers are started as `vllm`
    done = subprocess.run(
        [*PYTEST, "--kv-mode", mode, "--kv-log", str(log), *chosen.GROUPS[group]],
        cwd=FOLDER,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log.with_suffix(".txt").write_text(done.stdout)
    if done.returncode not in (0, 1):
        raise ValueError(f"{group}, {mode}: status {done.returncode}:\n{done.stdout}")
    records = read(log)
    print(f"{group}, {mode}: {len(records)} tests", flush=True)
    return records


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
