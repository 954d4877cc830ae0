"""EpiKV's scorers at events: ragged heads, gaps, padding, prompts, options."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from support.event_inputs import LENGTHS, make_inputs, one_event
from support.words import built
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.names import SCORERS
from vllm_kvpolicy.policies.scorers.epikv import MIXES, Mix
from vllm_kvpolicy.policies.words import BaseScorer

VARIANTS = get_args(SCORERS["epikv"].Options.model_fields["variant"].annotation)
STEP_VARIANTS = ("detrend", "variance", "band")


def build(**options: object) -> BaseScorer:
    return built(SCORERS["epikv"], **options)


def events(scorer: BaseScorer, seed: int = 0) -> EventInputs:
    """Ragged events whose requests have prompts of different lengths."""
    inputs = make_inputs(scorer.needs, seed=seed)
    if not scorer.needs.signals:
        return inputs
    generator = torch.Generator().manual_seed(seed)
    size = int(inputs.end.max()) + 9
    signals = {
        signal: torch.rand(len(LENGTHS), size, generator=generator) + 1
        for signal in scorer.needs.signals
    }
    for row, end in enumerate(inputs.end.tolist()):
        for measured in signals.values():
            measured[row, end:] = torch.nan  # of tokens that are still to come
    prompts = torch.tensor([3, 70, 200])
    return replace(inputs, signals=signals, prompt_lengths=prompts)


def score(scorer: BaseScorer, inputs: EventInputs) -> Tensor:
    result = scorer.score(inputs, None)
    assert result.shape == inputs.must_keep.shape
    assert result.dtype == torch.float32
    return result


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_but_the_event_itself_counts(variant: str) -> None:
    """Neighbours, padding and what lies behind a request's end change no bit."""
    scorer = build(variant=variant, epikv_chunk=16)
    inputs = events(scorer)
    together = score(scorer, inputs)
    for event, lengths in enumerate(LENGTHS):
        width = max(max(row) for row in lengths)
        alone = one_event(inputs, event, width)
        if scorer.needs.signals:
            end = int(inputs.end[event])
            rows = {
                s: row[event : event + 1, :end] for s, row in inputs.signals.items()
            }
            prompts = inputs.prompt_lengths[event : event + 1]
            alone = replace(alone, signals=rows, prompt_lengths=prompts)
        got, want = score(scorer, alone)[0], together[event, :, :, :width]
        valid = alone.valid[0]
        assert torch.equal(got[valid], want[valid])
        assert got[valid].isfinite().all()


@pytest.mark.parametrize("variant", ["kv-key", *STEP_VARIANTS])
def test_a_token_has_one_score(variant: str) -> None:
    """The mix of its signals, in all heads; prompt tokens have the highest."""
    scorer = build(variant=variant)
    inputs = events(scorer)
    got = score(scorer, inputs)
    for event, prompt in enumerate(inputs.prompt_lengths.tolist()):
        end = int(inputs.end[event])
        row = {s: rows[event, prompt:end][None] for s, rows in inputs.signals.items()}
        want = scorer.mix.scores(row, torch.zeros(1).long(), 64)[0]
        want = torch.cat([want.amax().clamp(min=0).expand(prompt), want])
        valid = inputs.valid[event]
        positions = inputs.positions[event][valid]
        assert torch.equal(got[event][valid], want[positions])
        assert (positions < prompt).any()
        assert (positions >= prompt).any()


@pytest.mark.parametrize("variant", [*STEP_VARIANTS, "segment"])
def test_prompts_can_be_scored_like_answers(variant: str) -> None:
    """As if the prompt were its first token alone."""
    scorer = build(variant=variant, epikv_scores_prompt=True)
    inputs = events(scorer)
    shortest = torch.ones_like(inputs.prompt_lengths)
    as_answers = replace(inputs, prompt_lengths=shortest)
    want = score(build(variant=variant), as_answers)
    assert torch.equal(score(scorer, inputs)[inputs.valid], want[inputs.valid])
    plain = score(build(variant=variant), inputs)
    assert not torch.equal(plain[inputs.valid], want[inputs.valid])


def test_segments_put_their_best_first() -> None:
    plain, segments = build(), build(variant="segment", epikv_chunk=16)
    inputs = events(segments)
    before, after = score(plain, inputs), score(segments, inputs)
    for row in range(12):
        valid = inputs.valid.flatten(0, 2)[row]
        old, new = (x.flatten(0, 2)[row][valid] for x in (before, after))
        raised = new != old
        assert 0 < raised.sum() < len(old)
        assert new[raised].min() > new[~raised].max()
        assert not (raised & inputs.must_keep.flatten(0, 2)[row][valid]).any()
        order = old[raised].argsort()
        assert (new[raised][order].diff() >= 0).all()


@pytest.mark.parametrize("event", range(len(LENGTHS)))
def test_a_lag_chunk_is_scaled_by_the_one_before(event: int) -> None:
    """Layers and heads count where they hold a token."""
    scorer = build(variant="lag-kv", epikv_chunk=16)
    inputs = events(scorer)
    got = score(scorer, inputs)[event]
    held = torch.tensor(LENGTHS[event])
    want = torch.zeros(int(held.max()))
    for states in (inputs.keys, inputs.values):
        spreads: list[list[Tensor]] = [[] for _ in want]
        for head in range(held.shape[1]):
            mean = torch.stack(
                [
                    states[event, held[:, head] > token, head, token].double().mean(0)
                    for token in range(int(held[:, head].max()))
                ]
            )
            for token, channels in enumerate(mean):
                start = token // 16 * 16
                if start:
                    past = mean[start - 16 : start]
                    low, high = past.amin(0), past.amax(0)
                    channels = (channels - low) / (high - low + 1e-9)
                spreads[token].append(channels.std())
        want += torch.stack([torch.stack(found).mean() for found in spreads])
    torch.testing.assert_close(got[0, 1, : len(want)], want, rtol=1e-5, atol=1e-6)
    assert torch.equal(got[0, 0], got[1, 1])


def test_options_choose_layers_weight_and_window() -> None:
    signals = {name: mix.signals for name, mix in MIXES.items()}
    scorer = build(a_first=3, a_last=5, b_last=7, a_weight=2.5, stat_window=9)
    assert scorer.stat_window == 9
    first, second = scorer.mix.signals
    assert (first.first, first.last) == (3, 5)
    assert (second.first, second.last) == (signals["detrend"][1].first, 7)
    assert scorer.mix.weights == (2.5, -1.0)
    assert build(variant="band").mix == MIXES["band"]
    assert build(variant="kv-key", a_first=3).mix.signals == signals["kv-key"]
    assert isinstance(build(variant="segment", a_first=3).mix, Mix)
