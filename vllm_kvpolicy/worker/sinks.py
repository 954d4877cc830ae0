"""Reads a model's learned sinks, and refuses models of which no test knows that.

A learned sink is a logit of each query head that takes part in every softmax and whose
share no token gets (gpt-oss, arXiv 2508.10925, section 2.2). Here `sinks` alone are the
first tokens of a request.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vllm_kvpolicy import compat


def no_sinks() -> None:
    """Return None: the model has no learned sinks."""


def logits_reader(layers: Sequence[Any]) -> Callable[[], torch.Tensor | None]:
    """Return what reads the logits of the learned sinks, [L, Hq] float32.

    Each call reads the layers' own: weights may be replaced while a server runs.

    Args:
        layers: vLLM's attention layers, loaded; all of them have sinks or none has.
    """
    return partial(_logits, layers) if _have_sinks(layers) else no_sinks


def _have_sinks(layers: Sequence[Any]) -> bool:
    return any(getattr(layer.impl, "sinks", None) is not None for layer in layers)


def _logits(layers: Sequence[Any]) -> torch.Tensor:
    return torch.stack([layer.impl.sinks.detach() for layer in layers]).float()


def check_known(layers: Sequence[Any], vllm_config: Any) -> None:
    """Refuse learned sinks that nothing at start-up has asked about.

    Args:
        layers: vLLM's attention layers, loaded.
        vllm_config: the engine's configuration.

    Raises:
        ValueError: the model's type is not one of which the table of refusals knows.
    """
    if _have_sinks(layers) and not compat.has_learned_sinks(vllm_config):
        raise ValueError(
            f"{vllm_config.model_config.model}: its attention layers have learned "
            "sinks, which are tested in models of type "
            f"{', '.join(compat.LEARNED_SINKS)} alone; leave out --kv-policy"
        )
