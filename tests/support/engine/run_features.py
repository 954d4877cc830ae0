"""Runs engines in a process of its own, whose compiled code meets nobody else's."""

import json
import sys
from pathlib import Path
from typing import Any

from support.engine.helpers import Engine, Job


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one engine.

    Args:
        spec: `model`, `policy` or None, `changes` of Engine, and `jobs`.

    Returns:
        Generated tokens, the engine's counters, and vLLM's compilation mode.
    """
    jobs = [Job(**job) for job in spec["jobs"]]
    with Engine(Path(spec["model"]), spec["policy"], **spec["changes"]) as engine:
        tokens = engine.run(jobs).tokens
        counters = engine.counters() if spec["policy"] else {}
        compilation = engine.llm.llm_engine.vllm_config.compilation_config
    mode = int(compilation.mode)
    return {"tokens": tokens, "counters": counters, "mode": mode}


if __name__ == "__main__":
    specs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(spec) for spec in specs]))
