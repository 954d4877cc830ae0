"""What a row of the table of refusals is, and what several rows ask."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.config import server_config
from vllm_kvpolicy.policies.names import ADMISSIONS, ALLOCATORS, SCORERS, SELECTIONS

Question = Callable[[Any], object]  # about a finished VllmConfig


@dataclass(frozen=True)
class Refusal:
    """One feature that does not go together with a policy yet.

    Args:
        feature: as a reader of vLLM's documentation knows it; see `listed`.
        applies: tells from a finished VllmConfig whether the feature is on.
        change: what to do about it, an imperative.
        by_machine: depends on the installation alone; `applies` ignores its argument.
    """

    feature: str
    applies: Question
    change: str
    by_machine: bool = False

    @cached_property
    def name(self) -> str:
        """The feature, with the words that it is about; imports all of them."""
        return self.feature.format_map(_Lists())


class _Lists(dict[str, str]):
    """The words of this package that have an attribute, by its name."""

    def __missing__(self, attribute: str) -> str:
        """Return them as code, separated by commas."""
        words = {**SCORERS, **ALLOCATORS, **ADMISSIONS, **SELECTIONS}
        return ", ".join(
            f"`{word}`" for word in words if getattr(words[word], attribute)
        )


def listed(attribute: str) -> str:
    """Return what stands in a feature for the words that have an attribute.

    They are listed where the feature is shown: a server imports no words but its own.
    """
    return f"{{{attribute}}}"


def both(first: Question, second: Question) -> Question:
    """Return the question whether both hold; the second is asked if the first does."""
    return lambda config: bool(first(config) and second(config))


def has_word_with(attribute: str) -> Question:
    """Return the question whether one of the server's policies has such a word."""

    def ask(config: Any) -> bool:
        server = server_config(config)
        return server is not None and any(
            getattr(word, attribute) for word in server.words
        )

    return ask


FITTED, is_fitted = listed("fitted"), has_word_with("fitted")


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
