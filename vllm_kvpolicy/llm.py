"""`LLM(model, kv_policy=...)`: vLLM's offline class with the flags as keywords."""

from typing import Any

from vllm_kvpolicy import compat

if missing := compat.missing_vllm():
    raise ImportError(missing)

import vllm  # noqa: E402

from vllm_kvpolicy.api import cli  # noqa: E402


class LLM(vllm.LLM):
    """vLLM's `LLM` that also takes the policy: the command line's flags as keywords.

    Args:
        kv_policy: None is stock vLLM, unless the environment has VLLM_KV_POLICY.
        kv_budget: K, tokens per KV head right after an event; "auto" for the pool's
            share of a request, "25%" for a share of each request's length.
        kv_events: "pressure", the default, or "always": when requests are cut.
        kv_pin: "none", "prompt" or a number of tokens: what stays of prompts.
        kv_policy_config: options of the policy.
        additional_config: vLLM's own; values given here as keywords win over it.
        **kwargs: everything else that vLLM's `LLM` takes.

    Raises:
        ValueError: a value is not valid, or a feature is refused with a policy.
    """

    def __init__(
        self,
        model: str,
        *,
        kv_policy: str | None = None,
        kv_budget: int | str | None = None,
        kv_interval: int | None = None,
        kv_ceiling: int | None = None,
        kv_recent: int | None = None,
        kv_sinks: int | None = None,
        kv_events: str | None = None,
        kv_pin: str | int | None = None,
        kv_policy_config: dict[str, Any] | None = None,
        additional_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = cli.given_values(locals())  # the keywords: nothing else is local yet
        merged = cli.merge(additional_config or {}, given)
        super().__init__(model, additional_config=merged, **kwargs)
