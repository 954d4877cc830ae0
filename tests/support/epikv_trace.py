"""EpiKV's scores of one trace of hidden states, without events."""

import torch

from vllm_kvpolicy.policies.scorers._signals import signals_from_hidden
from vllm_kvpolicy.policies.scorers.epikv import MIXES, Mix


def scores_from_hidden(
    hidden: torch.Tensor, mix: Mix = MIXES["detrend"], stat_window: int = 64
) -> torch.Tensor:
    """Score the generated tokens of one trace.

    Args:
        hidden: [N, S + 1, d] floating point, outputs of all N decoder layers at the
            prompt's last token and at S generated ones.
        mix: a value of `MIXES` that reads hidden states.
        stat_window: tokens in the rolling statistics.

    Returns:
        [S] float32, higher is kept sooner.

    Raises:
        ValueError: a mix of keys or values, or of layers that are not there.
    """
    measured = signals_from_hidden(mix.signals, hidden)
    first = torch.ones(1, dtype=torch.int64, device=hidden.device)
    return mix.scores(measured, first, stat_window)[0, 1:]
