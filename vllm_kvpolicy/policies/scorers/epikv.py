"""EpiKV: score_i = z_i(g_a) - z_i(g_b), g_l(i) = ||h_l(i) - h_l(i - 1)||, the step of
layer l's output; z is the rolling z-score over the newest 64 generated tokens up to i.

Source: EpiKV (arXiv 2606.26472) section 3 and
https://github.com/stevenkolawole/epiphany-kv-cache/blob/d424208/src/eviction.py. The
option `variant` names its kinds: "detrend" (EpiKV-Flat), "variance" (rolling means in
place of z), "band" (z of the mean step of two bands of layers), "kv-key" and "kv-val"
(rolling mean of the channels' variance), "lag-kv" (spread of keys and values, each
chunk scaled by the range of the chunk before), "segment" (EpiKV-Seg: the best tokens of
each segment first, more of them where keys vary more).
Deviations: unless options name layers that `python -m training epikv-layers` finds,
they are at the depths that the authors found for their model; tokens are dropped at
events, not one per step; the newest tokens that stay are the must-keep set that all
policies share (theirs min(128, K / 4)); K counts generated tokens where the prompt is
pinned (theirs the prompt, too); RoPE keeps true positions (theirs stop at K); norms are
not rounded to bf16. "segment" fills the budget with the next best tokens (theirs leaves
it empty). "lag-kv" averages keys over layers by cache index, which names different
tokens where heads keep different ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.ranking import leading_run, ranks_within
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.policies.options import BaseOptions, Layer
from vllm_kvpolicy.policies.scorers._signals import (
    TokenSignal,
    rolling_mean,
    rolling_zscore,
)
from vllm_kvpolicy.policies.words import BaseScorer

# Tokens kept first of each `SHARE_OF` tokens of a segment, by third of the segments:
# lowest key variance, middle, highest.
SHARES, SHARE_OF = (8, 32, 64), 128
LAG_EPS = 1e-9  # added to the range of a chunk


@dataclass(frozen=True)
class Mix:
    """The score of a token: a weighted sum of rolling statistics of its signals."""

    signals: tuple[TokenSignal, ...]
    weights: tuple[float, ...]
    statistic: Callable[[Tensor, Tensor, int], Tensor]

    def scores(
        self, measured: Mapping[TokenSignal, Tensor], first: Tensor, window: int
    ) -> Tensor:
        """Score every token of a trace, [E, P] float32, from signals of that shape.

        Takes what `rolling_mean` does; zero before `first`.
        """
        terms = [
            weight * self.statistic(measured[signal], first, window)
            for signal, weight in zip(self.signals, self.weights, strict=True)
        ]
        return torch.stack(terms).sum(0).float()


def _band(first: int, last: int) -> TokenSignal:
    """Return the step of layers `first` to `last` of the 32 that the authors used."""
    return TokenSignal("hidden", Fraction(first, 32), Fraction(last, 32))


_PAIR, _BANDS = (_band(10, 10), _band(21, 21)), (_band(7, 13), _band(18, 25))
MIXES = {
    "detrend": Mix(_PAIR, (1.0, -1.0), rolling_zscore),
    "variance": Mix(_PAIR, (1.0, -1.0), rolling_mean),
    "band": Mix(_BANDS, (1.29, -1.0), rolling_zscore),
    "kv-key": Mix((TokenSignal("key"),), (1.0,), rolling_mean),
    "kv-val": Mix((TokenSignal("value"),), (1.0,), rolling_mean),
}


class MixScorer(BaseScorer):
    """Scores a token once, by signals measured while it was computed, for all heads.

    Prompt tokens that nobody protects get the highest score of their request, at
    least 0, unless they are scored, too.

    Args:
        mix: what counts.
        stat_window: tokens in the rolling statistics.
        scores_prompt: score prompt tokens as generated ones, all but the first, which
            has no step.
    """

    summary = "change of the hidden state while the token was computed"
    source = "EpiKV, arXiv 2606.26472"
    pins_prompt = True
    measures_tokens = True

    class Options(BaseOptions):
        variant: Literal[
            "detrend", "variance", "band", "kv-key", "kv-val", "lag-kv", "segment"
        ] = Field("detrend", description="statistic that scores a token")
        a_first: Layer = Field(
            -1,
            description="first layer of band a, whose change raises a "
            "token's score; -1 picks it by depth",
        )
        a_last: Layer = Field(
            -1, description="last layer of band a; -1 picks it by depth"
        )
        b_first: Layer = Field(
            -1,
            description="first layer of band b, whose change lowers a "
            "token's score; -1 picks it by depth",
        )
        b_last: Layer = Field(
            -1, description="last layer of band b; -1 picks it by depth"
        )
        a_weight: float = Field(
            0.0,
            ge=0,
            le=1_000_000,
            description="weight of band a relative to band b; 0 takes the "
            "variant's default",
        )
        stat_window: int = Field(
            64, ge=2, le=4096, description="number of tokens in the rolling statistics"
        )
        epikv_chunk: int = Field(
            128,
            ge=2,
            le=65536,
            description="tokens per chunk for the variants lag-kv and segment",
        )
        epikv_scores_prompt: bool = Field(
            False,
            description="score prompt tokens that nobody protects as generated ones; "
            "else they rank before those",
        )

    @classmethod
    def build(cls, options: Any) -> BaseScorer:
        if options.variant == "lag-kv":
            return LagScorer(options.epikv_chunk)
        sizes = options.stat_window, options.epikv_scores_prompt
        if options.variant == "segment":
            return SegmentScorer(_mix("detrend", options), options.epikv_chunk, *sizes)
        return MixScorer(_mix(options.variant, options), *sizes)

    def __init__(self, mix: Mix, stat_window: int, scores_prompt: bool = False) -> None:
        self.mix = mix
        self.stat_window = stat_window
        self.scores_prompt = scores_prompt
        self.needs = Needs(positions=True, signals=mix.signals)

    def check_model(self, model: ModelShape) -> None:
        for band, signal in zip("ab", self.mix.signals, strict=False):
            try:
                signal.layers(model.num_layers)
            except ValueError as error:
                raise ValueError(f"{band}_first, {band}_last: {error}") from None

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        first = inputs.given("prompt_lengths")
        if self.scores_prompt:
            first = torch.ones_like(first)
        measured = {signal: _measured(inputs, signal) for signal in self.mix.signals}
        scores = self.mix.scores(measured, first, self.stat_window)
        position = torch.arange(scores.shape[-1], device=scores.device)
        is_known = (position >= first[:, None]) & (position < inputs.end[:, None])
        highest = scores.masked_fill(~is_known, 0.0).amax(-1, keepdim=True)
        return _at_positions(torch.where(is_known, scores, highest), inputs)


class SegmentScorer(MixScorer):
    """Puts the best tokens of each segment, `segment` tokens long, before all others.

    Segments are counted from the first token held, and ranked within by the mix.
    """

    variance = TokenSignal("key")

    def __init__(
        self, mix: Mix, segment: int, stat_window: int, scores_prompt: bool = False
    ) -> None:
        super().__init__(mix, stat_window, scores_prompt)
        self.segment = segment
        self.needs |= Needs(signals=(self.variance,))

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        score = super().score(inputs, usage)
        variance = _at_positions(_measured(inputs, self.variance), inputs)
        valid, must_keep = inputs.valid, inputs.must_keep
        recent = leading_run((must_keep | ~valid).flip(-1)).flip(-1)
        is_best = best_of_segments(
            score.flatten(0, 2),
            variance.flatten(0, 2),
            ~recent.flatten(0, 2),
            ~must_keep.flatten(0, 2),
            self.segment,
            tuple(self.segment * share // SHARE_OF for share in SHARES),
        )
        highest = score.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
        lowest = score.masked_fill(~valid, torch.inf).amin(-1, keepdim=True)
        return score + (highest - lowest + 1) * is_best.view(score.shape)


class LagScorer(BaseScorer):
    """Scores a token by the spread of its key and value, seen from the chunk before.

    Chunks of so many tokens are counted from the first one held.
    """

    needs = Needs(keys=True, values=True)

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32, the same for all layers and heads."""
        valid = inputs.valid
        spread = lag_spread(inputs.given("keys"), valid, self.chunk)
        spread = spread + lag_spread(inputs.given("values"), valid, self.chunk)
        spread = inputs.ranks.mean(spread)
        return spread[:, None, None].expand(valid.shape)


def _mix(variant: str, options: Any) -> Mix:
    """Return a mix of `MIXES` with the layers and the weight that the options name."""
    mix = MIXES[variant]
    if len(mix.signals) < 2:
        return mix
    signals = []
    for band, signal in zip("ab", mix.signals, strict=True):
        ends = {end: getattr(options, f"{band}_{end}") for end in ("first", "last")}
        chosen = {end: layer for end, layer in ends.items() if layer >= 0}
        signals.append(replace(signal, **chosen))
    weight = options.a_weight or mix.weights[0]
    return Mix(tuple(signals), (weight, mix.weights[1]), mix.statistic)


def _measured(inputs: EventInputs, signal: TokenSignal) -> Tensor:
    """Return a signal, a mean over the heads of all ranks, [E, P] float32."""
    values = inputs.given("signals")[signal]
    return values if signal.kind == "hidden" else inputs.ranks.mean(values)


def _at_positions(by_position: Tensor, inputs: EventInputs) -> Tensor:
    """Look [E, P] values up at the true positions of the held tokens, [E, L, H, T]."""
    positions = inputs.given("positions").clamp(0, by_position.shape[-1] - 1)
    rows = by_position[:, None, None].expand(*positions.shape[:3], -1)
    return rows.gather(-1, positions)


def best_of_segments(
    score: Tensor,
    variance: Tensor,
    older: Tensor,
    free: Tensor,
    segment: int,
    shares: Sequence[int],
) -> Tensor:
    """Mark the best tokens of each segment: more of them where keys vary more.

    Segments are ordered by mean variance; the lowest third (rounded down) keeps the
    first share, those up to two thirds (rounded down) the second, others the third.

    Args:
        score: [R, T] floating point.
        variance: [R, T] floating point.
        older: [R, T] bool, tokens in segments: True up to some point, then False.
        free: [R, T] bool, tokens that need to be chosen in order to stay.
        segment: tokens per segment.
        shares: three numbers of tokens, see above.

    Returns:
        [R, T] bool.
    """
    num_tokens = score.shape[-1]
    segment = min(segment, num_tokens)
    pad = (0, -num_tokens % segment)
    inside = F.pad(older, pad).unflatten(-1, (-1, segment))
    known = F.pad(torch.where(older, variance.double(), 0.0), pad)
    mean = known.unflatten(-1, (-1, segment)).sum(-1) / inside.sum(-1)  # NaN: empty
    num_segments = inside.any(-1).sum(-1, keepdim=True)
    from_top = ranks_within(mean, torch.zeros_like(mean, dtype=torch.int64))
    place = num_segments - 1 - from_top
    low, middle, high = shares
    share = torch.where(place < 2 * num_segments // 3, middle, high)
    share = torch.where(place < num_segments // 3, low, share)
    index = torch.arange(num_tokens, device=score.device) // segment
    index = index.expand_as(score)
    is_choosable = older & free
    group = torch.where(is_choosable, index, share.shape[-1])
    return is_choosable & (ranks_within(score, group) < share.gather(-1, index))


def lag_spread(states: Tensor, valid: Tensor, chunk: int) -> Tensor:
    """Measure how far the channels of the mean over layers spread, mean over heads.

    Each channel is scaled by its range in the chunk before; the first chunk is not.

    Args:
        states: [E, L, H, T, D] floating point, cached keys or values.
        valid: [E, L, H, T] bool, False on padding, whose states may hold anything.

    Returns:
        [E, T] float32.
    """
    # A sum over layers in float64, a summand, and four float32 copies of the mean.
    event_bytes = 32 * states[0, 0].numel()
    of_chunk = partial(_spread_of_mean, chunk)
    return map_pairs(of_chunk, event_bytes, states[:, None], valid[:, None])[:, 0]


def _spread_of_mean(chunk: int, states: Tensor, valid: Tensor) -> Tensor:
    """Return [n, T] of states [n, L, H, T, D]; see `lag_spread`."""
    num_tokens = states.shape[3]
    chunk = min(chunk, num_tokens)
    num_layers = valid.sum(1)  # [n, H, T]
    mean = states.new_zeros(states[:, 0].shape, dtype=torch.float64)
    for layer, is_held in zip(states.unbind(1), valid.unbind(1), strict=True):
        mean += torch.where(is_held[..., None], layer, 0.0)
    mean /= num_layers.clamp(min=1)[..., None]
    mean = F.pad(mean.float(), (0, 0, 0, -num_tokens % chunk))
    mean = mean.unflatten(2, (-1, chunk))  # [n, H, chunks, chunk, D]
    low, high = mean.amin(3, keepdim=True), mean.amax(3, keepdim=True)
    shift = F.pad(low[:, :, :-1], (0, 0, 0, 0, 1, 0))
    width = F.pad((high - low)[:, :, :-1] + LAG_EPS, (0, 0, 0, 0, 1, 0), value=1.0)
    spread = ((mean - shift) / width).std(-1).flatten(2)[..., :num_tokens]
    is_held = num_layers > 0
    total = torch.where(is_held, spread, 0.0).sum(1)
    return total / is_held.sum(1).clamp(min=1)
