"""Serves one request and writes down which files of the package it passes.

A program of its own: vLLM loads plugins once per process. Prints one line of JSON.

    python -m support.engine.main_path MODEL_DIR    (in tests/)
"""

import inspect
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = "vllm_kvpolicy"
FLAGS = ["--kv-policy", "ams-tova", "--kv-budget", "128", "--kv-interval", "64"]
FLAGS += ["--kv-events", "always"]
ENGINE = {
    "--dtype": "float32",
    "--max-model-len": "512",
    "--block-size": "32",
    "--num-gpu-blocks-override": "40",
    "--kv-cache-memory-bytes": str(8 * 2**20),
}
PROMPT_TOKENS, NEW_TOKENS = 150, 64  # one event in the prompt's last step or soon after


class Walk:
    """Records calls of the package's functions, those that imports make left out.

    Attributes:
        called: modules by phase, in the order of their first call.
        stacks: modules that were on the stack when a kernel was called while serving.
    """

    def __init__(self) -> None:
        spec = find_spec(PACKAGE)
        self.root = str(Path(spec.origin).parent) + os.sep
        self.phase = "start"
        self.called: dict[str, list[str]] = {"start": [], "serve": []}
        self.stacks: set[tuple[str, ...]] = set()
        self.module_of = cache(self._module_of)

    def on_call(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take down one call; a trace function."""
        module = self.module_of(frame.f_code)
        if module is None or self._is_import(frame):
            return
        if module not in self.called[self.phase]:
            self.called[self.phase].append(module)
        if self.phase == "serve" and module.startswith("kernels."):
            self.stacks.add(tuple(self._stack(frame)))

    def _module_of(self, code: CodeType) -> str | None:
        """Return the module of one of the package's functions, None for others."""
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if not is_function or not code.co_filename.startswith(self.root):
            return None
        path = code.co_filename.removeprefix(self.root).removesuffix(".py")
        return path.replace(os.sep, ".")

    def _is_import(self, frame: FrameType) -> bool:
        """Return whether a module's own code, run by its import, made the call."""
        return any(
            not caller.f_code.co_flags & inspect.CO_OPTIMIZED
            and caller.f_code.co_filename.startswith(self.root)
            for caller in _callers(frame)
        )

    def _stack(self, frame: FrameType) -> list[str]:
        """Return the modules on the stack, the outermost first, each once."""
        found = [self.module_of(each.f_code) for each in (frame, *_callers(frame))]
        return list(dict.fromkeys(module for module in found if module))[::-1]


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames below one, the innermost first."""
    while caller := frame.f_back:
        yield caller
        frame = caller


def serve(model: str, walk: Walk) -> int:
    """Start an engine from flags and serve a request; return the number of tokens."""
    from vllm import EngineArgs, SamplingParams, TokensPrompt
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    from support.engine.helpers import make_prompt

    engine = [part for pair in ENGINE.items() for part in pair]
    sys.settrace(walk.on_call)
    load_general_plugins()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(
        ["--model", model, "--enforce-eager", *engine, *FLAGS]
    )
    llm = LLMEngine.from_engine_args(EngineArgs.from_cli_args(arguments))
    walk.phase = "serve"
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    prompt = TokensPrompt(prompt_token_ids=make_prompt(1, PROMPT_TOKENS))
    llm.add_request("request", prompt, params)
    num_tokens = 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            num_tokens = len(output.outputs[0].token_ids)
    sys.settrace(None)
    return num_tokens


def main() -> None:
    """Walk, and print what was passed."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    walk = Walk()
    num_tokens = serve(sys.argv[1], walk)
    found = {
        "called": walk.called,
        "stacks": sorted(walk.stacks),
        "num_tokens": num_tokens,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
