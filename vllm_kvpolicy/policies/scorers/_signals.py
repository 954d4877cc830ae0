"""Signals of tokens, and rolling statistics over them: what `epikv` reads.

Every sum of a rolling statistic adds the same entries in the same order in float64,
wherever the row starts and however long it is, so that a recomputed token gets the
value that it had.

Source: EpiKV's rolling mean and z-score; see `epikv`. Deviations: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TokenSignal:
    """What the worker measures at every token while it is computed.

    One number per token, averaged over some layers of what each of them shows.

    Args:
        kind: "hidden", how far the layer's output moved since the token before; "key"
            or "value", variance over channels of the cached vector, mean over heads.
        first: first layer, counted from 0, or as a fraction of the model's depth.
        last: last layer, included, as `first`; None for the model's last.
    """

    kind: Literal["hidden", "key", "value"]
    first: int | Fraction = 0
    last: int | Fraction | None = None

    def layers(self, num_layers: int) -> range:
        """Return the layers to measure in a model; ValueError where it has no such."""
        last = num_layers - 1 if self.last is None else self.last
        first, last = (
            int(end * num_layers) if isinstance(end, Fraction) else end
            for end in (self.first, last)
        )
        if not 0 <= first <= last < num_layers:
            raise ValueError(
                f"layers of a signal: got {first} to {last}, expected 0 <= first <= "
                f"last <= {num_layers - 1}"
            )
        return range(first, last + 1)


def hidden_change(hidden: Tensor, before: Tensor) -> Tensor:
    """Measure ||hidden - before||_2 of a layer's outputs, also at the tokens before.

    Both are [..., d] model dtype, to which the difference is rounded; the norm, [...]
    float32, is not.
    """
    return torch.linalg.vector_norm(hidden - before, dim=-1, dtype=torch.float32)


def signals_from_hidden(
    signals: Sequence[TokenSignal], hidden: Tensor
) -> dict[TokenSignal, Tensor]:
    """Measure signals on the hidden states of one trace.

    Args:
        signals: of the kind "hidden"; others raise ValueError, as absent layers do.
        hidden: [N, T, d] floating point, outputs of all N decoder layers.

    Returns:
        By signal, [1, T] float32; zero at the first token.
    """
    measured = {}
    for signal in signals:
        if signal.kind != "hidden":
            raise ValueError(
                f"signals: got {signal.kind!r}, expected 'hidden', the "
                "only kind that hidden states contain"
            )
        layers = signal.layers(len(hidden))
        chosen = hidden[layers.start : layers.stop]
        step = hidden_change(chosen[:, 1:], chosen[:, :-1]).double().mean(0).float()
        measured[signal] = torch.cat([step.new_zeros(1), step])[None]
    return measured


def channel_variance(vectors: Tensor) -> Tensor:
    """Average heads' unbiased variance of channels, [T, H, D] to [T] float32."""
    return vectors.float().var(-1).mean(-1)


Z_EPS = 1e-6  # added to the standard deviation


def rolling_mean(values: Tensor, first: Tensor, window: int) -> Tensor:
    """Average the newest entries up to each one.

    Args:
        values: [R, T] floating point.
        first: [R] int64, entries before it are padding, whatever they hold.
        window: entries that count, the last one included, at least 1.

    Returns:
        [R, T] float64; zero before `first`.
    """
    exists, count = _samples(values, first, window)
    return _window_sum(torch.where(exists, values.double(), 0.0), window) / count


def rolling_zscore(values: Tensor, first: Tensor, window: int) -> Tensor:
    """Measure how far each entry lies from the rolling mean, in standard deviations.

    Takes what `rolling_mean` takes.

    Returns:
        [R, T] float64, (value - mean) / (population standard deviation + 1e-6); zero
        where fewer than two entries count.
    """
    exists, count = _samples(values, first, window)
    known = torch.where(exists, values.double(), 0.0)
    mean = _window_sum(known, window) / count
    variance = _window_sum(known.square(), window) / count - mean.square()
    score = (known - mean) / (variance.clamp_min(0).sqrt() + Z_EPS)
    return torch.where(count > 1, score, 0.0)


def _samples(values: Tensor, first: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return which entries exist and how many count at each one, both [R, T]."""
    age = torch.arange(values.shape[-1], device=values.device) - first[:, None]
    return age >= 0, (age + 1).clamp(1, window)


def _window_sum(values: Tensor, window: int) -> Tensor:
    """Sum `window` entries up to each one, [R, T] float64; outside counts as zero.

    Pooling adds them one by one: a difference of running sums would round differently
    in rows that start elsewhere.
    """
    padded = F.pad(values[:, None], (window - 1, 0))
    return F.avg_pool2d(padded, (1, window), stride=1, divisor_override=1)[:, 0]
