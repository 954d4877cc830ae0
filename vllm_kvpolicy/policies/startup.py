"""What a word checks before an engine starts: its files, its model, its settings.

A row of the catalogue names its `Startup` by a dotted path, so that importing the
catalogue loads none. `api.engine_config` loads those of the words that a server uses,
and those of admissions with model classes of their own, which refuse models that must
not be served without them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_kvpolicy.config_keys import AlwaysKept
from vllm_kvpolicy.policies.catalogue.rows import WordRow, load


class Startup:
    """A word without files; subclasses override what they need."""

    def check(self, options: Any, kept: AlwaysKept, vllm_config: Any) -> None:
        """Check that the word can serve a model under a server's settings.

        Args:
            options: the word's own, an instance of its row's `options`.
            kept: the tokens that the server always keeps.
            vllm_config: the finished VllmConfig.

        Raises:
            ValueError: one sentence with what was found and what to change.
        """

    def refuse_plain(self, model_config: Any) -> None:
        """Refuse a model that must not be served without this word.

        Args:
            model_config: vLLM's ModelConfig.

        Raises:
            ValueError: saying what to add.
        """

    def missing_architecture(self, config: Mapping[str, Any]) -> str | None:
        """Return the architecture of a model whose config.json leaves it out.

        Args:
            config: what config.json says.

        Returns:
            None where the model is not the word's.

        Raises:
            ValueError: it is the word's, but of a type that is not supported.
        """
        return None


def startup_of(row: WordRow) -> Startup:
    """Return what a row of the catalogue checks before an engine starts."""
    return Startup() if row.startup is None else load(row.startup)()


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a whole model, which files have to fit.

    Args:
        num_layers: L, attention layers.
        num_heads: Hq, query heads per layer.
        num_kv_heads: H, KV heads per layer.
        head_dim: D, channels per head.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, vllm_config: Any) -> "ModelShape":
        """Read the sizes from a finished VllmConfig."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        return cls(
            num_layers=model.get_num_layers(parallel),
            num_heads=model.model_arch_config.total_num_attention_heads,
            num_kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
        )


@contextmanager
def errors_name(key: str) -> Iterator[None]:
    """Begin every ValueError raised inside with the option that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
