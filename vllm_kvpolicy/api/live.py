"""Puts the live routes on a server whose command line asks for them."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import guards
from vllm_kvpolicy.api.engines import smallest_pool
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig
from vllm_kvpolicy.config_values import own_config
from vllm_kvpolicy.kernels import preferences
from vllm_kvpolicy.observe.routes import STREAM, LiveRoutes, api_keys
from vllm_kvpolicy.observe.shared_files import engines_here
from vllm_kvpolicy.policies.fingerprint import file_options
from vllm_kvpolicy.sizes import (
    capacity_line,
    own_block_size,
    sharing_line,
    total_kv_heads,
)

VERSIONS = ("vllm-kvpolicy", "vllm", "torch", "triton")


def attach(app: Any) -> None:
    """Add the routes to vLLM's application, where the server's policy has `live`.

    The FastAPI application's state gets the VllmConfig later.
    """
    additional = app.state.args.additional_config
    values = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
    config = None if values is None else KVPolicyConfig.from_dict(values)
    if config is None or not config.live:
        return
    live = LiveRoutes(
        facts=lambda: facts(app.state.vllm_config),
        engines=lambda: engines(app.state.vllm_config),
        pool_blocks=lambda: (smallest_pool(app.state.vllm_config) or 1) - 1,
        keys=api_keys(app.state.args),
        server=lambda: getattr(app.state, "server", None),
        token_text=partial(_token_text, app) if config.live_text else None,
    )
    app.routes.extend(live.routes())
    _leave_out_of_durations(app)


def _leave_out_of_durations(app: Any) -> None:
    """Keep the stream out of the durations of requests, where it would be a long one.

    vLLM puts the middleware that measures them on the application with a list of paths
    that it leaves out; it starts with the first request.
    """
    for middleware in app.user_middleware:
        left_out = middleware.kwargs.get("excluded_handlers")
        if left_out is not None:
            stream = re.compile(f"^{re.escape(STREAM)}$")
            middleware.kwargs["excluded_handlers"] = [*left_out, stream]


def engines(vllm_config: Any) -> tuple[Mapping[int, str], int]:
    """Return the engines of this host by index, and how many ranks have own heads."""
    size = vllm_config.parallel_config.tensor_parallel_size
    return engines_here(vllm_config), min(size, total_kv_heads(vllm_config))


def facts(vllm_config: Any) -> dict[str, Any]:
    """Return what is fixed for the life of a server with a policy, JSON-able."""
    config = own_config(vllm_config)
    platform, model = compat.platform_name(), vllm_config.model_config
    num_blocks = smallest_pool(vllm_config)
    values = config.to_dict()
    del values["trace_dir"]
    del values["policy_config"]  # paths of the server's files are its own affair
    options = {
        key: Path(value).name if key in file_options(config) and value else value
        for key, value in config.resolved().options.items()
    }
    served = model.served_model_name
    return {
        **values,
        "budget": config.budget_tokens,
        "budget_text": config.budget_word if config.budget_share else None,
        "options": options,
        "model": served[0] if isinstance(served, list) else served,
        "block_size": own_block_size(vllm_config),
        "max_model_len": model.max_model_len,
        "pool_blocks": num_blocks and num_blocks - 1,
        "capacity": num_blocks and capacity_line(vllm_config, config, num_blocks),
        "sharing": sharing_line(vllm_config, config),
        "engines": list(engines_here(vllm_config)),
        "all_engines": vllm_config.parallel_config.data_parallel_size,
        "platform": platform,
        "kernels": preferences.summary(platform),
        "versions": {name: compat.package_version(name) for name in VERSIONS},
        "refused": {row.name: row.change for row in guards.REFUSALS},
    }


def _token_text(app: Any, token: int) -> str:
    """Return a token's text; at the start of a text some lose their blank."""
    tokenizer = app.state.engine_client.get_tokenizer()
    return tokenizer.decode([token, token])[len(tokenizer.decode([token])) :]
