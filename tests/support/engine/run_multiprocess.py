"""Runs policies with the engine in processes of its own and writes what they gave."""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from support.programs import run_program
from vllm_kvpolicy.observe.metrics import CounterFile
from vllm_kvpolicy.observe.shared_files import own_engine


def run_apart(
    specs: list[dict[str, Any]], folder: Path, **environment: str
) -> list[dict[str, Any]]:
    """Run engines in a process of their own; see `run`."""
    spec, out = folder / "spec.json", folder / "out.json"
    spec.write_text(json.dumps(specs))
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    run_program("support.engine.run_multiprocess", spec, out, **environment)
    return json.loads(out.read_text())


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one engine.

    Args:
        spec: `arguments` of LLM, `prompts`, `max_tokens` of every request, and where
            they ask for anything, `extra_args` of each.

    Returns:
        Generated tokens, the engine's counters, and how many processes it had.
    """
    llm = LLM(**spec["arguments"])
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=spec["max_tokens"],
            ignore_eos=True,
            extra_args=asked,
        )
        for asked in spec.get("extra_args", [None] * len(spec["prompts"]))
    ]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in spec["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    engine = own_engine(llm.llm_engine.vllm_config)
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": CounterFile(engine, create=False).read(),
        "processes": 1 + len(multiprocessing.active_children()),
    }
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    specs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(spec) for spec in specs]))
