"""The functions of vLLM that are wrapped, as one table: why, and until when.

`patch` wraps them; `version_check` first checks them, together with what is overridden
and read.
"""

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One function of vLLM that is wrapped.

    Args:
        target: "module:attribute.path".
        signature: how the tested release declares it, see `vllm_source.signature_of`.
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
    (
        "self request_id prompt params supported_tasks arrival_time lora_request "
        "tokenization_kwargs trace_headers priority data_parallel_rank resumable "
        "session_id kv_hints"
    ),
    "nothing validates vllm_xargs before they reach the engine",
    "vLLM lets the scheduler class or a plugin validate vllm_xargs",
)
GENERATE = Patch(
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    (
        "async self prompt sampling_params request_id * prompt_text lora_request "
        "tokenization_kwargs trace_headers priority data_parallel_rank session_id "
        "kv_hints reasoning_ended reasoning_parser_kwargs"
    ),
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
    (
        "async self request_id engine_input sampling_params context tok_params "
        "lora_request priority trace_headers session_id reasoning_parser_kwargs"
    ),
    "a streamed response calls generate after it has sent its HTTP status",
    "same as for process_inputs",
)
PATCHES = (
    ADD_CLI_ARGS,
    FROM_CLI_ARGS,
    CREATE_ENGINE_CONFIG,
    PROCESS_INPUTS,
    ENGINE_READY,
    GENERATE,
    RESPONSES,
    BEAM_COMPLETION,
    BEAM_CHAT,
    ATTACH_METRICS,
)
