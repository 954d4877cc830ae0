"""The functions of vLLM that are wrapped, as one table: why, and until when.

`patch` wraps them. Every start with a policy first compares them with the source of the
installed vLLM, so that an offline engine need not import what only servers use.
`tools.vllm_surface` compares them with other releases, and all that we override and
read besides.
"""

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_kvpolicy import compat

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Decorators that change how what they decorate is used.
BINDING = (
    *("classmethod", "staticmethod", "property", "cached_property"),
    *("cache", "lru_cache"),
)


@dataclass(frozen=True)
class Patch:
    """One function of vLLM that is wrapped.

    Args:
        target: "module:attribute.path".
        signature: how the tested release declares it, see `signature_of`.
        why: what vLLM has no hook for.
        remove_when: what would make the wrap unnecessary.
    """

    target: str
    signature: str
    why: str
    remove_when: str

    def resolve(self) -> tuple[Any, str]:
        """Import the owner and return it with the name of the attribute.

        Raises:
            ImportError, AttributeError: vLLM no longer has it.
        """
        module, _, path = self.target.partition(":")
        owner = import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        inspect.getattr_static(owner, name)
        return owner, name

    def declared(self) -> str | None:
        """Return how the installed vLLM declares it, in the form of `signature`.

        Returns:
            "" for what is no function, None where vLLM has nothing of that name.
        """
        module, _, path = self.target.partition(":")
        found: Any = read_module(module)
        for name in path.split("."):
            body = getattr(found, "body", ())
            named = [each for each in body if getattr(each, "name", None) == name]
            found = named[-1] if named else None
        if found is None:
            return None
        return signature_of(found) if isinstance(found, Function) else ""


ADD_CLI_ARGS = Patch(
    "vllm.engine.arg_utils:EngineArgs.add_cli_args",
    "@staticmethod parser",
    "plugins cannot add flags",
    "vLLM calls plugins with the parser",
)
FROM_CLI_ARGS = Patch(
    "vllm.engine.arg_utils:EngineArgs.from_cli_args",
    "@classmethod cls args",
    "only fields of EngineArgs are read from the command line",
    "vLLM calls plugins with the parsed command line",
)
CREATE_ENGINE_CONFIG = Patch(
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "self usage_context headless",
    "the last place where arguments can change and the first with a full VllmConfig",
    "vLLM calls plugins with the VllmConfig",
)
PROCESS_INPUTS = Patch(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "self request_id prompt params supported_tasks arrival_time lora_request "
    "tokenization_kwargs trace_headers priority data_parallel_rank resumable "
    "session_id kv_hints",
    "nothing validates vllm_xargs before they reach the engine",
    "vLLM lets the scheduler class or a plugin validate vllm_xargs",
)
GENERATE = Patch(
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    "async self prompt sampling_params request_id * prompt_text lora_request "
    "tokenization_kwargs trace_headers priority data_parallel_rank session_id "
    "kv_hints reasoning_ended reasoning_parser_kwargs",
    "a streamed response sends its HTTP status before its request is prepared",
    "same as for process_inputs",
)
ATTACH_METRICS = Patch(
    "vllm.entrypoints.serve.instrumentator.metrics:attach_router",
    "app",
    "with several API servers, /metrics reads only what vLLM's processes wrote",
    "vLLM lets plugins register collectors",
)
ENGINE_READY = Patch(
    "vllm.v1.engine.core_client:MPClient._apply_ready_response",
    "self payload",
    "an API process learns the sum of its engines' pools, and not what policy they run",
    "vLLM calls plugins with the answers of its engines",
)
BEAM_COMPLETION = Patch(
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest"
    ".to_beam_search_params",
    "self max_tokens default_sampling_params",
    "beam search silently drops vllm_xargs",
    "BeamSearchParams carry vllm_xargs",
)
BEAM_CHAT = Patch(
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"
    ".to_beam_search_params",
    "self max_tokens default_sampling_params",
    "same as for completions",
    "same as for completions",
)
RESPONSES = Patch(
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
    "._generate_with_builtin_tools",
    "async self request_id engine_input sampling_params context tok_params "
    "lora_request priority trace_headers session_id reasoning_parser_kwargs",
    "a streamed response calls generate after it has sent its HTTP status",
    "same as for process_inputs",
)
PREPROCESS_CHAT = Patch(
    "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat",
    "async self request messages default_template default_template_content_format "
    "default_template_kwargs tool_dicts parser * skip_mm_cache",
    "a chat template does not tell which tokens its messages become",
    "vLLM says which tokens of a prompt are of which message",
)
PATCHES = (
    ADD_CLI_ARGS,
    FROM_CLI_ARGS,
    CREATE_ENGINE_CONFIG,
    PROCESS_INPUTS,
    ENGINE_READY,
    GENERATE,
    PREPROCESS_CHAT,
    RESPONSES,
    BEAM_COMPLETION,
    BEAM_CHAT,
    ATTACH_METRICS,
)


def problems(patches: Iterable[Patch] = PATCHES) -> list[str]:
    """Return a sentence for each function that the installed vLLM does not have so.

    Where its release differs from the tested one, a row of `compat.RELEASES` says how,
    and that our wraps bear it.
    """
    changed = compat.release_of(compat.vllm_version()).changed
    advice = f"install vLLM {compat.TESTED_VLLM}.x"
    found = []
    for patch in patches:
        declared = patch.declared()
        if declared is None:
            found.append(f"vLLM has no {patch.target}: {advice}")
        elif declared not in (patch.signature, changed.get(patch.target)):
            lists = (", ".join(each.split()) for each in (declared, patch.signature))
            got, expected = (words or "nothing" for words in lists)
            found.append(
                f"{patch.target} is declared with {got}, expected {expected}: {advice}"
            )
    return found


def signature_of(function: Function) -> str:
    """Return how a function is declared, without defaults and types.

    Returns:
        Words with a blank between two: the decorators of `BINDING` with "@", "async",
        then the parameters as Python writes them, with "/", "*", "*rest" and
        "**keywords". "@classmethod cls a * b" is one; "()" takes nothing.
    """
    takes = function.args
    words = [f"@{name}" for name in decorators_of(function) if name in BINDING]
    words += ["async"] * isinstance(function, ast.AsyncFunctionDef)
    words += [each.arg for each in takes.posonlyargs] + ["/"] * bool(takes.posonlyargs)
    words += [each.arg for each in takes.args]
    if takes.vararg or takes.kwonlyargs:
        words.append(f"*{takes.vararg.arg if takes.vararg else ''}")
    words += [each.arg for each in takes.kwonlyargs]
    words += [f"**{takes.kwarg.arg}"] if takes.kwarg else []
    return " ".join(words) or "()"


def decorators_of(function: Function) -> list[str]:
    """Return the names of its decorators: "c" of "a.b.c" and of "a.b.c(...)"."""
    called = (
        each.func if isinstance(each, ast.Call) else each
        for each in function.decorator_list
    )
    return [ast.unparse(each).rpartition(".")[2] for each in called]


@cache
def read_module(module: str) -> ast.Module | None:
    """Return a parsed module of the installed vLLM, None where there is none."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm is not installed")
    for path in map(Path(spec.origin).parents[1].joinpath, files_of(module)):
        if path.is_file():
            return ast.parse(path.read_bytes())
    return None


def files_of(module: str) -> tuple[str, str]:
    """Return the two files, within a wheel, of which one may be a module."""
    base = module.replace(".", "/")
    return f"{base}.py", f"{base}/__init__.py"
