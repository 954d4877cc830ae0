"""What a row of the table of refusals is, and what several rows ask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.config import server_config
from vllm_kvpolicy.policies.catalogue.admissions import ADMISSIONS
from vllm_kvpolicy.policies.catalogue.names import parse
from vllm_kvpolicy.policies.catalogue.scorers import SCORERS


@dataclass(frozen=True)
class Refusal:
    """One feature that does not go together with a policy yet.

    Args:
        name: the feature, as a reader of vLLM's documentation knows it.
        applies: tells from a finished VllmConfig whether the feature is on.
        change: what to do about it, an imperative.
        by_machine: depends on the installation alone; `applies` ignores its argument.
    """

    name: str
    applies: Callable[[Any], bool]
    change: str
    by_machine: bool = False


def is_fitted(config: Any) -> bool:
    """Return whether a policy has words that belong to the weights of the model."""
    server = server_config(config)
    return server is not None and any(
        row.is_fitted for name in server.policies for row in parse(name).parts
    )


FITTED = ", ".join(
    f"`{name}`" for name, word in {**SCORERS, **ADMISSIONS}.items() if word.is_fitted
)


def is_float8(config: Any) -> bool:
    return config.cache_config.cache_dtype in compat.FLOAT8_CACHES


def is_ragged(config: Any) -> bool:
    """Return whether heads may keep different numbers of tokens."""
    server = server_config(config)
    return server is not None and server.is_ragged
