"""Runs a group of checks in this process, for `runner.run_group`: GROUP FILE."""

import os
import sys
from pathlib import Path

from benchmarks.gpu.check.runner import GROUPS, Checks

if __name__ == "__main__":
    name, lines = sys.argv[1:]
    os.environ.update(GROUPS[name].environment)
    GROUPS[name].run(Checks(name, Path(lines)))
