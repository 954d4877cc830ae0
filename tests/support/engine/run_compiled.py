"""Runs engines in a process of its own, whose compiled code meets nobody else's."""

import json
import sys
from pathlib import Path
from typing import Any

from support.engine.helpers import Engine, Job
from support.programs import run_program


def caches_in(folder: Path) -> dict[str, str]:
    """Return the environment of an engine that keeps compiled code in a folder."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def run_elsewhere(specs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run engines one after another in a process that keeps its compiled code.

    Args:
        specs: see `run`.
        folder: compiled code stays in its folder `cache`.
    """
    spec, out = folder / "spec.json", folder / "out.json"
    spec.write_text(json.dumps(specs))
    run_program("support.engine.run_compiled", spec, out, **caches_in(folder))
    return json.loads(out.read_text())


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one engine.

    Args:
        spec: `model`, `policy` or None, `changes` of Engine, and `jobs`.

    Returns:
        Generated tokens, the engine's counters, vLLM's compilation mode, and the name
        of the folder where it keeps what it has compiled: its key.
    """
    jobs = [Job(**job) for job in spec["jobs"]]
    with Engine(Path(spec["model"]), spec["policy"], **spec["changes"]) as engine:
        tokens = engine.run(jobs).tokens
        counters = engine.counters() if spec["policy"] else {}
        compilation = engine.llm.llm_engine.vllm_config.compilation_config
    mode = int(compilation.mode)
    key = Path(compilation.local_cache_dir or "").name
    return {"tokens": tokens, "counters": counters, "mode": mode, "key": key}


if __name__ == "__main__":
    specs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(spec) for spec in specs]))
