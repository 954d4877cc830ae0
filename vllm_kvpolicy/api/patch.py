"""The only assignments onto vLLM's objects; patch_table says what is wrapped and why.

`install()` is called by plugin in every process and teaches vLLM's argument parser the
flags. What a policy needs beyond that is put in place when an engine is configured
with one. Everything else hooks into vLLM by names that vLLM itself resolves.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import cli
from vllm_kvpolicy.api.guards import machine_refusals, refusals
from vllm_kvpolicy.api.patch_table import (
    ADD_CLI_ARGS,
    ATTACH_METRICS,
    BEAM_CHAT,
    BEAM_COMPLETION,
    CREATE_ENGINE_CONFIG,
    FROM_CLI_ARGS,
    GENERATE,
    OFFLINE_PATCHES,
    PATCHES,
    PROCESS_INPUTS,
    RESPONSES,
    Patch,
    signature_problems,
)
from vllm_kvpolicy.api.request_guards import (
    check_beam_search,
    check_params,
    check_request,
)
from vllm_kvpolicy.api.start_checks import (
    check_files,
    missing_architecture,
    refuse_plain,
)
from vllm_kvpolicy.config import (
    CONFIG_KEY,
    KVPolicyConfig,
    has_policy,
    server_config,
)
from vllm_kvpolicy.metrics import Collector

logger = init_logger("vllm.kv_policy")

# The name that all processes of a server know its counters by, beside CONFIG_KEY. Only
# command lines are given one.
ENGINE_KEY = "kv_policy_engine"


class KVPolicyRequestError(VLLMValidationError, ValueError):
    """A request that the policy refuses: HTTP 400, and ValueError for `LLM` users."""


def install() -> None:
    """Wrap what the flags need; calling it again changes nothing."""
    _wrap(ADD_CLI_ARGS, _with_flags)
    _wrap(FROM_CLI_ARGS, _with_given_values)
    _wrap(CREATE_ENGINE_CONFIG, _with_policy)


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
        with _start_errors(is_command=True):
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
        serves_http = _serves_http(args, kwargs)
        if values is None:
            vllm_config = original(self, *args, **kwargs)
            with _start_errors(serves_http):
                refuse_plain(vllm_config.model_config)
            if _is_counted(vllm_config):
                _choose_counting(vllm_config.scheduler_config)
                if serves_http:
                    _wrap(ATTACH_METRICS, _with_counters)
            return vllm_config
        is_command = ENGINE_KEY in additional
        with _start_errors(is_command):
            config = KVPolicyConfig.from_dict(values)
            needed = PATCHES if serves_http else OFFLINE_PATCHES
            # Other refusals read a VllmConfig that only a known version is sure to
            # have.
            _refuse(config, machine_refusals() + signature_problems(needed))
            _prepare_arguments(self, config)
        vllm_config = original(self, *args, **kwargs)
        with _start_errors(is_command):
            _finish_config(vllm_config, config)
            if compat.is_first_process(self):
                check_files(config, vllm_config)
        _wrap(PROCESS_INPUTS, _with_request_check)
        if serves_http:
            _wrap_server()
        return vllm_config

    return create_engine_config


def _is_counted(vllm_config: Any) -> bool:
    """Return whether an engine without a policy was asked to count what it holds."""
    scheduler = vllm_config.scheduler_config
    return scheduler.scheduler_cls in compat.COUNTING_CLASSES.values()


def _choose_counting(scheduler: Any) -> None:
    """Name the counting class that schedules as vLLM would without it."""
    is_async = bool(scheduler.async_scheduling)
    scheduler.scheduler_cls = compat.COUNTING_CLASSES[is_async]


def _wrap_server() -> None:
    """Wrap what only HTTP servers use."""
    _wrap(ATTACH_METRICS, _with_counters)
    _wrap(GENERATE, _with_early_check)
    _wrap(RESPONSES, _with_early_response_check)
    _wrap(BEAM_COMPLETION, _with_beam_check)
    _wrap(BEAM_CHAT, _with_beam_check)


@contextmanager
def _start_errors(is_command: bool) -> Iterator[None]:
    """Answer a wrong command line as argparse does; Python code gets the ValueError."""
    try:
        yield
    except ValueError as error:
        if not is_command:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _prepare_arguments(engine_args: Any, config: KVPolicyConfig) -> None:
    """Choose what the user left open and a policy depends on.

    Args:
        engine_args: EngineArgs; changed.
        config: the parsed policy.
    """
    if engine_args.enable_prefix_caching is None:
        engine_args.enable_prefix_caching = False
    missing = missing_architecture(engine_args.model)
    if missing and not engine_args.hf_overrides:
        engine_args.hf_overrides = {"architectures": [missing]}
    platform = compat.platform_name()
    if engine_args.block_size is None:
        engine_args.block_size = compat.BLOCK_TOKENS.get(platform)
    chosen = (engine_args.attention_backend, engine_args.attention_config.backend)
    if platform == "cuda" and chosen == (None, None):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        chosen_name = compat.cuda_attention_backend(str(engine_args.dtype))
        engine_args.attention_backend = AttentionBackendEnum[chosen_name]
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


def _server_of(owner: Any) -> KVPolicyConfig | None:
    """Return the policy of the engine that an object of vLLM belongs to, parsed once.

    Args:
        owner: has `vllm_config`; the answer is kept on it.
    """
    if not hasattr(owner, "kv_policy_server"):
        owner.kv_policy_server = server_config(owner.vllm_config)
    return owner.kv_policy_server


def _with_request_check(original: Callable) -> Callable:
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        server = _server_of(self)
        if server is not None:
            with _client_errors():
                check_request(request, self.vllm_config, server)
        return request

    return process_inputs


def _with_early_check(original: Callable) -> Callable:
    def generate(
        self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _check_early(self, prompt, sampling_params)
        return original(self, prompt, sampling_params, *args, **kwargs)

    return generate


def _with_early_response_check(original: Callable) -> Callable:
    def generate_with_builtin_tools(
        self: Any,
        request_id: str,
        engine_input: Any,
        sampling_params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _check_early(self.engine_client, engine_input, sampling_params)
        return original(
            self, request_id, engine_input, sampling_params, *args, **kwargs
        )

    return generate_with_builtin_tools


def _check_early(engine: Any, prompt: Any, params: Any) -> None:
    """Check a request whose answer has not begun, its prompt as far as it is known."""
    server = _server_of(engine)
    if server is not None:
        known = isinstance(prompt, dict) and prompt.get("prompt_token_ids")
        with _client_errors():
            check_params(params, len(known or ()), engine.vllm_config, server)


def _with_beam_check(original: Callable) -> Callable:
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _client_errors():
            check_beam_search(self.vllm_xargs)
        return original(self, *args, **kwargs)

    return to_beam_search_params


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
            if vllm_config is not None and (
                has_policy(vllm_config) or _is_counted(vllm_config)
            ):
                counters = CollectorRegistry()
                labels = _labels(vllm_config)
                counters.register(Collector(vllm_config.instance_id, labels))
                text += generate_latest(counters)
            return owner.PrometheusResponse(text)

        # Before vLLM's own route, which does not know the engine's counters.
        app.routes.insert(0, Route("/metrics", metrics))

    return attach_router
