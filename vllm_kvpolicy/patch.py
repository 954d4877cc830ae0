"""The only assignments onto vLLM's objects, as one table.

`install()` is called by plugin in every process and teaches vLLM's argument parser the
flags. What a policy needs beyond that is put in place when an engine is configured
with one. Everything else hooks into vLLM by names that vLLM itself resolves.
Process: api
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from uuid import uuid4

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from vllm_kvpolicy import cli, compat
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig, has_policy
from vllm_kvpolicy.guards import machine_refusals, refusals
from vllm_kvpolicy.metrics import Collector
from vllm_kvpolicy.request_guards import check_params, check_request, server_config

logger = init_logger("vllm.kv_policy")

# The name that all processes of a server know its counters by, beside CONFIG_KEY.
ENGINE_KEY = "kv_policy_engine"


class KVPolicyRequestError(VLLMValidationError, ValueError):
    """A request that the policy refuses: HTTP 400, and ValueError for `LLM` users."""


@dataclass(frozen=True)
class Patch:
    """One function of vLLM that is wrapped.

    Args:
        target: "module:attribute.path".
        parameters: the names that its signature must have.
        why: what vLLM has no hook for.
        remove_when: what would make the wrap unnecessary.
    """

    target: str
    parameters: tuple[str, ...]
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
    ("parser",),
    "plugins cannot add flags",
    "vLLM calls plugins with the parser",
)
FROM_CLI_ARGS = Patch(
    "vllm.engine.arg_utils:EngineArgs.from_cli_args",
    ("args",),
    "only fields of EngineArgs are read from the command line",
    "vLLM calls plugins with the parsed command line",
)
CREATE_ENGINE_CONFIG = Patch(
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    ("self", "usage_context", "headless"),
    "the last place where arguments can change and the first with a whole VllmConfig",
    "vLLM calls plugins with the VllmConfig",
)
PROCESS_INPUTS = Patch(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    (
        "self",
        "request_id",
        "prompt",
        "params",
        "supported_tasks",
        "arrival_time",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "resumable",
        "session_id",
        "kv_hints",
    ),
    "vllm_xargs are not validated by anyone before they reach the engine",
    "vLLM validates vllm_xargs with a hook of the scheduler class or of a plugin",
)
GENERATE = Patch(
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    (
        "self",
        "prompt",
        "sampling_params",
        "request_id",
        "prompt_text",
        "lora_request",
        "tokenization_kwargs",
        "trace_headers",
        "priority",
        "data_parallel_rank",
        "session_id",
        "kv_hints",
        "reasoning_ended",
        "reasoning_parser_kwargs",
    ),
    "a streamed answer has its status before its request is prepared",
    "as for process_inputs",
)
ATTACH_METRICS = Patch(
    "vllm.entrypoints.serve.instrumentator.metrics:attach_router",
    ("app",),
    "where several API servers run, /metrics reads only what processes of vLLM wrote",
    "vLLM lets plugins register collectors",
)
OFFLINE_PATCHES = (ADD_CLI_ARGS, FROM_CLI_ARGS, CREATE_ENGINE_CONFIG, PROCESS_INPUTS)
PATCHES = (*OFFLINE_PATCHES, GENERATE, ATTACH_METRICS)


def install() -> None:
    """Wrap what the flags need; calling it again changes nothing."""
    _wrap(ADD_CLI_ARGS, _with_flags)
    _wrap(FROM_CLI_ARGS, _with_given_values)
    _wrap(CREATE_ENGINE_CONFIG, _with_policy)


def signature_problems(patches: tuple[Patch, ...] = PATCHES) -> list[str]:
    """Return a sentence for each function that vLLM has changed or dropped."""
    problems = []
    for patch in patches:
        try:
            owner, name = patch.resolve()
        except (ImportError, AttributeError):
            problems.append(f"vLLM has no {patch.target}: {_version_advice()}")
            continue
        found = tuple(inspect.signature(getattr(owner, name)).parameters)
        if found != patch.parameters:
            problems.append(
                f"{patch.target} takes {', '.join(found)}, expected "
                f"{', '.join(patch.parameters)}: {_version_advice()}"
            )
    return problems


def _version_advice() -> str:
    return f"install vLLM {compat.SUPPORTED_VLLM}.x"


def _wrap(patch: Patch, make: Callable[[Callable], Callable]) -> None:
    """Put a wrapper in the place of a function, once.

    Args:
        patch: what to wrap.
        make: returns the wrapper of the function that it is given; for a class method
            both take the class first.
    """
    owner, name = patch.resolve()
    raw = inspect.getattr_static(owner, name)
    is_descriptor = isinstance(raw, staticmethod | classmethod)
    function = raw.__func__ if is_descriptor else raw
    if getattr(function, "kv_policy_patch", None) is patch:
        return
    wrapper: Any = make(function)
    wrapper.__wrapped__ = function
    wrapper.__doc__, wrapper.__name__ = function.__doc__, function.__name__
    wrapper.kv_policy_patch = patch
    setattr(owner, name, type(raw)(wrapper) if is_descriptor else wrapper)


def _with_flags(original: Callable) -> Callable:
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        cli.add_arguments(parser)
        return parser

    return add_cli_args


def _with_given_values(original: Callable) -> Callable:
    def from_cli_args(cls: type, args: Any) -> Any:
        engine_args = original(cls, args)
        given = cli.given_values(vars(args))
        merged = cli.merge(engine_args.additional_config, given)
        if isinstance(merged, dict) and CONFIG_KEY in merged:
            # API servers are started with the same `args`, each makes its own
            # VllmConfig; this is what they and the engine have in common.
            merged = {ENGINE_KEY: uuid4().hex, **merged}
            engine_args.additional_config = merged
            args.additional_config = merged
        return engine_args

    return from_cli_args


def _with_policy(original: Callable) -> Callable:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        additional = self.additional_config
        values = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
        if values is None:
            return original(self, *args, **kwargs)
        config = KVPolicyConfig.from_dict(values)
        serves_http = _serves_http(args, kwargs)
        needed = PATCHES if serves_http else OFFLINE_PATCHES
        # Other refusals read a VllmConfig that only a known version is sure to have.
        _refuse(config, machine_refusals() + signature_problems(needed))
        _prepare_arguments(self, config)
        vllm_config = original(self, *args, **kwargs)
        _finish_config(vllm_config, config)
        _wrap(PROCESS_INPUTS, _with_request_check)
        if serves_http:
            _wrap(ATTACH_METRICS, _with_counters)
            _wrap(GENERATE, _with_early_check)
        return vllm_config

    return create_engine_config


def _prepare_arguments(engine_args: Any, config: KVPolicyConfig) -> None:
    """Choose what the user left open and a policy depends on.

    Args:
        engine_args: EngineArgs; changed.
        config: the parsed policy.
    """
    if engine_args.enable_prefix_caching is None:
        engine_args.enable_prefix_caching = False
    platform = compat.platform_name()
    if engine_args.block_size is None:
        engine_args.block_size = compat.BLOCK_TOKENS.get(platform)
    chosen = (engine_args.attention_backend, engine_args.attention_config.backend)
    if platform == "cuda" and chosen == (None, None):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        engine_args.attention_backend = AttentionBackendEnum.TRITON_ATTN
    logger.info(
        "--kv-policy %s: prefix caching is off, block size %s, attention backend %s",
        config.policy,
        engine_args.block_size,
        engine_args.attention_backend or "as the platform chooses",
    )


def _refuse(config: KVPolicyConfig, reasons: list[str]) -> None:
    """Raise ValueError with every reason at once, if there is any."""
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise ValueError(
            f"--kv-policy {config.policy} is not supported together with:{lines}"
        )


def _finish_config(vllm_config: Any, config: KVPolicyConfig) -> None:
    """Refuse what is not supported, then name our classes.

    Args:
        vllm_config: VllmConfig; changed.
        config: the parsed policy.

    Raises:
        ValueError: with every reason at once.
    """
    _refuse(config, refusals(vllm_config))
    config.validate_block_size(vllm_config.cache_config.block_size)
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    parallel.worker_cls = compat.WORKER_CLASSES[parallel.worker_cls]
    is_async = bool(scheduler.async_scheduling)
    scheduler.scheduler_cls = compat.SCHEDULER_CLASSES[is_async]
    additional = dict(vllm_config.additional_config)
    # Not left in the config: vLLM's compile cache is keyed by it.
    engine = additional.pop(ENGINE_KEY, None) or uuid4().hex
    vllm_config.additional_config = {**additional, CONFIG_KEY: config.to_dict()}
    vllm_config.instance_id = engine


def _serves_http(args: tuple, kwargs: dict) -> bool:
    """Tell from the arguments of create_engine_config whether it is for a server."""
    from vllm.usage.usage_lib import UsageContext

    context = args[0] if args else kwargs.get("usage_context")
    return context is UsageContext.OPENAI_API_SERVER


def _labels(vllm_config: Any) -> dict[str, str]:
    """Return the labels that vLLM puts on its own series."""
    name = vllm_config.model_config.served_model_name
    name = name[0] if isinstance(name, list) else name
    return {"model_name": str(name), "engine": "0"}


def _with_request_check(original: Callable) -> Callable:
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        with _client_errors():
            server = server_config(self.vllm_config)
            if server is not None:
                check_request(request, self.vllm_config, server)
        return request

    return process_inputs


def _with_early_check(original: Callable) -> Callable:
    def generate(
        self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ):
        with _client_errors():
            server = server_config(self.vllm_config)
            if server is not None:
                known = isinstance(prompt, dict) and prompt.get("prompt_token_ids")
                length = len(known or ())
                check_params(sampling_params, length, self.vllm_config, server)
        return original(self, prompt, sampling_params, *args, **kwargs)

    return generate


@contextmanager
def _client_errors() -> Iterator[None]:
    """Turn ValueError into the error that vLLM answers with HTTP 400."""
    try:
        yield
    except ValueError as error:
        raise KVPolicyRequestError(str(error)) from None


def _with_counters(original: Callable) -> Callable:
    def attach_router(app: Any) -> None:
        from prometheus_client import CollectorRegistry, generate_latest
        from starlette.routing import Route

        original(app)
        owner, _ = ATTACH_METRICS.resolve()
        registry = owner.get_prometheus_registry()

        def metrics(request: Any) -> Any:
            text = generate_latest(registry)
            vllm_config = getattr(request.app.state, "vllm_config", None)
            if vllm_config is not None and has_policy(vllm_config):
                counters = CollectorRegistry()
                labels = _labels(vllm_config)
                counters.register(Collector(vllm_config.instance_id, labels))
                text += generate_latest(counters)
            return owner.PrometheusResponse(text)

        # Before vLLM's own route, which does not know the engine's counters.
        app.routes.insert(0, Route("/metrics", metrics))

    return attach_router
