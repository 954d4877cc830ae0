"""The only changes to vLLM's classes and modules, each a row of patch_table.

`install()` is called by plugin in every process and teaches vLLM's argument parser the
flags. What a policy needs beyond that is put in place when an engine is configured
with one. A wrapper here only calls: `engine_config` for engines, `request_guards` for
requests. Everything else hooks into vLLM by names that vLLM itself resolves, and a few
methods of single objects are replaced where they are used, in `block_manager` and
`worker`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from vllm.usage.usage_lib import UsageContext

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import chats, cli, engine_config, engines, live, request_guards
from vllm_kvpolicy.api import patch_table as table
from vllm_kvpolicy.config_values import server_config
from vllm_kvpolicy.observe.metrics import exposition, register
from vllm_kvpolicy.sizes import settled


def install() -> None:
    """Wrap what the flags need; calling it again changes nothing."""
    _wrap(table.ADD_CLI_ARGS, _with_flags)
    _wrap(table.FROM_CLI_ARGS, _with_given_values)
    _wrap(table.CREATE_ENGINE_CONFIG, _with_policy)
    # vLLM warns of variables that it does not know, or refuses to start.
    for name in cli.VARIABLES.keys() & compat.policy_variables():
        # Their values are not told: vLLM keys what it has compiled by them.
        compat.known_variables().setdefault(name, lambda: None)


def _wrap(patch: table.Patch, make: Callable[[Callable], Callable]) -> None:
    """Put a wrapper in the place of a function, once.

    Args:
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
        engine_config.read_command_line(engine_args, args)
        return engine_args

    return from_cli_args


def _with_policy(original: Callable) -> Callable:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = args[0] if args else kwargs.get("usage_context")
        serves_http = context is UsageContext.OPENAI_API_SERVER
        runs_batch = context is UsageContext.OPENAI_BATCH_RUNNER
        is_open = self.max_num_seqs is None
        config = engine_config.prepare(self)
        vllm_config = original(self, *args, **kwargs)
        if config is None:
            engine_config.finish_stock(vllm_config, serves_http or runs_batch)
            if serves_http and engine_config.is_counted(vllm_config):
                _wrap(table.ATTACH_METRICS, _with_counters)
            return vllm_config
        chats.check_server(config, vllm_config, serves_http or runs_batch)
        engine_config.finish(self, vllm_config, config, may_limit=is_open)
        _wrap(table.PROCESS_INPUTS, _with_request_check)
        _wrap(table.ENGINE_READY, _with_engine_check)
        if serves_http or runs_batch:
            _wrap_server()
        if runs_batch:
            register(vllm_config)
        return vllm_config

    return create_engine_config


def _wrap_server() -> None:
    _wrap(table.ATTACH_METRICS, _with_counters)
    _wrap(table.GENERATE, _with_early_check)
    _wrap(table.PREPROCESS_CHAT, _with_chat_tokens)
    _wrap(table.RESPONSES, _with_early_response_check)
    _wrap(table.BEAM_COMPLETION, _with_beam_check)
    _wrap(table.BEAM_CHAT, _with_beam_check)


def _with_engine_check(original: Callable) -> Callable:
    def apply_ready_response(self: Any, payload: bytes) -> None:
        has_policy = server_config(self.vllm_config) is not None
        if has_policy:
            engines.note_ready(self.vllm_config, payload)
        original(self, payload)
        if has_policy:
            settled(self.vllm_config, engines.smallest_pool(self.vllm_config))

    return apply_ready_response


def _with_request_check(original: Callable) -> Callable:
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        request = original(self, request_id, prompt, params, *args, **kwargs)
        request_guards.check_prepared(self, request, params)
        return request

    return process_inputs


def _checked_by(check: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Return what wraps a method of which `check` gets the arguments first."""

    def make(original: Callable) -> Callable:
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            check(self, *args, **kwargs)
            return original(self, *args, **kwargs)

        return checked

    return make


_with_early_check = _checked_by(request_guards.check_early)
_with_early_response_check = _checked_by(
    lambda self, request_id, engine_input, sampling_params, *_, **__: (
        request_guards.check_early(self.engine_client, engine_input, sampling_params)
    )
)
_with_beam_check = _checked_by(
    lambda self, *_, **__: request_guards.check_beam_search(self.vllm_xargs)
)


def _with_chat_tokens(original: Callable) -> Callable:
    async def preprocess_chat(
        self: Any, request: Any, messages: Any, *args: Any, **kwargs: Any
    ) -> Any:
        keys = chats.wants(self.renderer.config, request)
        if not keys:
            return await original(self, request, messages, *args, **kwargs)
        messages = chats.listed(messages)
        found = await original(self, request, messages, *args, **kwargs)

        async def render(others: Any) -> Any:
            options = {**kwargs, "parser": None}  # which would change the request
            _, (other,) = await original(self, request, others, *args, **options)
            return other.get("prompt_token_ids") or ()

        known = found[1][0].get("prompt_token_ids") or ()
        await chats.put_tokens(keys, render, request, messages, known)
        return found

    return preprocess_chat


def _with_counters(original: Callable) -> Callable:
    def attach_router(app: Any) -> None:
        from starlette.routing import Route

        original(app)
        owner, _ = table.ATTACH_METRICS.resolve()
        registry, missed = owner.get_prometheus_registry(), set[str]()

        def metrics(request: Any) -> Any:
            vllm_config = getattr(request.app.state, "vllm_config", None)
            is_ours = vllm_config is not None and (
                server_config(vllm_config) or engine_config.is_counted(vllm_config)
            )
            text = exposition(registry, vllm_config if is_ours else None, missed)
            return owner.PrometheusResponse(text)

        # Before vLLM's own route, which does not know the engine's counters; for all
        # paths that it answers, such as /metrics/.
        app.routes.insert(0, Route("/metrics{path:path}", metrics))
        live.attach(app)

    return attach_router
