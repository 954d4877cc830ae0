"""What a row of the table of refusals is, and what several rows ask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.config import server_config
from vllm_kvpolicy.policies.catalogue.admissions import ADMISSIONS
from vllm_kvpolicy.policies.catalogue.allocators import ALLOCATORS
from vllm_kvpolicy.policies.catalogue.names import parse
from vllm_kvpolicy.policies.catalogue.scorers import SCORERS
from vllm_kvpolicy.policies.catalogue.selections import SELECTIONS

WORDS = {**SCORERS, **ALLOCATORS, **ADMISSIONS, **SELECTIONS}
Question = Callable[[Any], object]  # about a finished VllmConfig


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
    applies: Question
    change: str
    by_machine: bool = False


def both(first: Question, second: Question) -> Question:
    """Return the question whether both hold; the second is asked if the first does."""
    return lambda config: bool(first(config) and second(config))


def words_with(trait: str) -> str:
    """Return the words of the grammar whose rows have a trait, such as "rotates"."""
    return ", ".join(f"`{name}`" for name, row in WORDS.items() if getattr(row, trait))


def has_word_with(trait: str) -> Question:
    """Return the question whether one of the server's policies has such a word."""

    def ask(config: Any) -> bool:
        server = server_config(config)
        return server is not None and any(
            getattr(row, trait) for name in server.policies for row in parse(name).parts
        )

    return ask


FITTED, is_fitted = words_with("is_fitted"), has_word_with("is_fitted")


def is_float8(config: Any) -> bool:
    return config.cache_config.cache_dtype in compat.FLOAT8_CACHES


def is_ragged(config: Any) -> bool:
    """Return whether heads may keep different numbers of tokens."""
    server = server_config(config)
    return server is not None and server.is_ragged


def is_on_gpu(config: Any) -> bool:
    """Return whether this machine's platform is not the CPU."""
    return compat.platform_name() != "cpu"


def speculates(config: Any) -> bool:
    return config.speculative_config is not None


def has_adapters(config: Any) -> bool:
    return config.lora_config is not None


def transfers_weights(config: Any) -> bool:
    return config.weight_transfer_config is not None
