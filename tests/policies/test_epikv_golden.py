"""EpiKV against the authors' own run, stage by stage: signals, scores, evictions.

Each later stage starts from the stored result of the one before, as float32 leaves
gaps between scores that are smaller than what a rounding upstream moves them by.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from support.epikv_trace import scores_from_hidden
from support.golden import Golden
from vllm_kvpolicy.kernels.ranking import top_k_mask
from vllm_kvpolicy.policies.scorers._signals import (
    channel_variance,
    signals_from_hidden,
)
from vllm_kvpolicy.policies.scorers.epikv import MIXES, best_of_segments, lag_spread

GOLDEN = "epikv"

TRACES = (0, 1, 2)
MODEL_LAYERS = 32
ULP_BF16 = 2**-7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Our variants, and the names that the file has for their signals and scores.
SIGNALS = {"detrend": "epikv", "band": "band_adaptive"}
CACHE_SIGNALS = {"kv-key": ("kv_key", "k"), "kv-val": ("kv_val", "v")}
SCORES = {**SIGNALS, "variance": "hs_variance"}
CHUNK, SHARES = 16, (2, 5, 9)  # as the authors' classes were set up for this file


class Trace:
    """One trace of the file.

    Attributes:
        prompt: P, tokens of the prompt.
        steps: S, generated tokens.
        budget: K, prompt included.
        recent: newest tokens that stay.
    """

    def __init__(self, golden: Golden, index: int) -> None:
        conf = map(int, golden[f"t{index}_conf"])
        self.prompt, self.steps, self.budget, recent, self.window = conf
        self.recent = min(recent, self.budget // 4)
        self._golden, self._prefix = golden, f"t{index}_"

    def __getitem__(self, name: str) -> np.ndarray:
        return self._golden[self._prefix + name]

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self[name])

    def hidden(self, dtype: torch.dtype) -> Tensor:
        """Hidden states [32, S + 1, d]; zero where a layer is not stored."""
        stored = self.tensor("hs")
        hidden = torch.zeros(MODEL_LAYERS, *stored.shape[1:])
        hidden[torch.from_numpy(self._golden["hs_layers"]).long()] = stored
        return hidden.to(dtype)

    def must_keep(self, step: int) -> Tensor:
        """[P + S] bool: the prompt, and the newest tokens of step `step`."""
        position = torch.arange(self.prompt + self.steps)
        newest = self.prompt + step
        is_recent = (position > newest - self.recent) & (position <= newest)
        return (position < self.prompt) | is_recent

    def replay(self, keep_of: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
        """Drop tokens whenever more than K are held.

        Args:
            keep_of: takes [P + S] masks of held and must-keep tokens, returns what
                stays.

        Returns:
            [P + S], the step at which each position was dropped, -1 for never.
        """
        held = torch.arange(self.prompt + self.steps) < self.prompt
        dropped_at = torch.full(held.shape, -1)
        for step in range(self.steps):
            held[self.prompt + step] = True
            if held.sum() > self.budget:
                keep = keep_of(held, self.must_keep(step))
                dropped_at[held & ~keep] = step
                held = keep
        return dropped_at.numpy()

    def replay_scores(self, score: Tensor) -> np.ndarray:
        """Replay with scores [S] that tokens get once."""
        by_position = torch.cat([torch.zeros(self.prompt), score.float()])[None]

        def keep_of(held: Tensor, must_keep: Tensor) -> Tensor:
            rows = (by_position, (must_keep & held)[None], held[None])
            return top_k_mask(*rows, self.budget)[0]

        return self.replay(keep_of)


def scores(trace: Trace, variant: str, stored: list[np.ndarray]) -> np.ndarray:
    """Scores [S] of a variant from stored signals."""
    mix = MIXES[variant]
    rows = [torch.from_numpy(signal).float()[None] for signal in stored]
    measured = dict(zip(mix.signals, rows, strict=True))
    return mix.scores(measured, torch.zeros(1).long(), trace.window)[0].numpy()


@pytest.mark.parametrize("index", TRACES)
@pytest.mark.parametrize("variant", SIGNALS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_hidden_states(
    golden: Golden, index: int, variant: str, dtype: str
) -> None:
    trace, signals = Trace(golden, index), MIXES[variant].signals
    measured = signals_from_hidden(signals, trace.hidden(DTYPES[dtype]))
    for band, signal in zip("ab", signals, strict=True):
        got = measured[signal][0, 1:]
        want = trace[f"{dtype}_{SIGNALS[variant]}_g_{band}"]
        if dtype == "bf16" and variant == "detrend":
            # The authors round the norm to bf16; of a band, each before the mean.
            np.testing.assert_array_equal(got.bfloat16().float(), want)
        rtol = ULP_BF16 if dtype == "bf16" else 1e-6
        np.testing.assert_allclose(got, want, rtol=rtol)


@pytest.mark.parametrize("index", TRACES)
@pytest.mark.parametrize("variant", CACHE_SIGNALS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_variance_of_channels(
    golden: Golden, index: int, variant: str, dtype: str
) -> None:
    trace, (name, states) = Trace(golden, index), CACHE_SIGNALS[variant]
    vectors = trace.tensor(states).to(DTYPES[dtype])[:, :, trace.prompt :]
    layers = [channel_variance(layer.transpose(0, 1)) for layer in vectors]
    rtol = ULP_BF16 if dtype == "bf16" else 1e-6
    want = trace[f"{dtype}_{name}_g"]
    np.testing.assert_allclose(torch.stack(layers).mean(0), want, rtol=rtol)


@pytest.mark.parametrize("index", TRACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rolling_means(golden: Golden, index: int, dtype: str) -> None:
    trace = Trace(golden, index)
    pair = [trace[f"{dtype}_epikv_g_{band}"] for band in "ab"]
    want = trace[f"{dtype}_hs_variance_score"]
    np.testing.assert_allclose(scores(trace, "variance", pair), want, rtol=1e-6)
    for variant, (name, _) in CACHE_SIGNALS.items():
        got = scores(trace, variant, [trace[f"{dtype}_{name}_g"]])
        np.testing.assert_allclose(got, trace[f"{dtype}_{name}_score"], rtol=1e-6)


@pytest.mark.parametrize("index", TRACES)
@pytest.mark.parametrize("variant", SCORES)
def test_tokens_dropped_end_to_end(golden: Golden, index: int, variant: str) -> None:
    trace = Trace(golden, index)
    score = scores_from_hidden(trace.hidden(torch.float32), MIXES[variant])
    got = trace.replay_scores(score)
    want = trace[f"fp32_{SCORES[variant]}_evicted_at"]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("index", TRACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_dropped_by_segments(golden: Golden, index: int, dtype: str) -> None:
    """Here as there: what is not among the best of its segment goes."""
    trace = Trace(golden, index)
    score = torch.cat(
        [torch.zeros(trace.prompt), trace.tensor(f"{dtype}_epikv_score").float()]
    )
    keys = trace.tensor("k").to(DTYPES[dtype]).transpose(1, 2)
    variance = torch.stack([channel_variance(layer) for layer in keys]).mean(0)

    def keep_of(held: Tensor, must_keep: Tensor) -> Tensor:
        index = held.nonzero()[:, 0]
        older = torch.arange(len(index)) < len(index) - trace.recent
        rows = (score[index], variance[index], older, ~must_keep[index])
        best = best_of_segments(*(row[None] for row in rows), CHUNK, SHARES)[0]
        keep = must_keep & held
        keep[index[best]] = True
        return keep

    want = trace[f"{dtype}_kv_seg_hs_evicted_at"]
    np.testing.assert_array_equal(trace.replay(keep_of), want)


@pytest.mark.parametrize("index", TRACES)
@pytest.mark.parametrize("name", ["lag_kv_key", "lag_kv"])
def test_tokens_dropped_by_lag(golden: Golden, index: int, name: str) -> None:
    trace = Trace(golden, index)
    keys, values = (trace.tensor(states)[None] for states in "kv")

    def keep_of(held: Tensor, must_keep: Tensor) -> Tensor:
        index = held.nonzero()[:, 0]
        valid = torch.ones(1, *keys.shape[1:3], len(index), dtype=torch.bool)
        score = lag_spread(keys[:, :, :, index], valid, CHUNK)
        if name == "lag_kv":
            score += lag_spread(values[:, :, :, index], valid, CHUNK)
        rows = (score, must_keep[index][None], torch.ones_like(score).bool())
        keep = torch.zeros_like(held)
        keep[index[top_k_mask(*rows, trace.budget)[0]]] = True
        return keep

    want = trace[f"fp32_{name}_evicted_at"]
    np.testing.assert_array_equal(trace.replay(keep_of), want)
