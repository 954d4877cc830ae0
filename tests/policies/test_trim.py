"""Appendix K.1 of WG-KV, `trim` and `snapmax`, as plain loops over a ragged batch."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from support import event_inputs as events
from support.brute_ams import best
from support.words import built
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.allocators.trim import TrimAllocator
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.compose import MEMORY, AdmittedPolicy, BaseAdmission
from vllm_kvpolicy.policies.scorers.snapmax import SnapMaxScorer

WINDOW = 16
SHORT = (((9, 8), (7, 2)), ((8, 3), (9, 6)), ((4, 9), (5, 2)))
Row = tuple[int, int, int]


def admit(inputs: EventInputs) -> EventInputs:
    """Let two in three tokens of even heads be candidates, one in three of odd ones."""
    token = torch.arange(inputs.must_keep.shape[-1])
    head = torch.arange(inputs.must_keep.shape[2])[:, None]
    admitted = torch.where(head % 2 == 0, token % 3 != 1, token % 3 == 1)
    return replace(inputs, candidates=inputs.valid & (admitted | inputs.must_keep))


def held_by(inputs: EventInputs, row: Row) -> list[int]:
    held = inputs.valid if inputs.candidates is None else inputs.candidates
    return held[row].nonzero().flatten().tolist()


def scores_by_loops(
    inputs: EventInputs, row: Row, window: int, kernel: int
) -> dict[int, float]:
    """Score the droppable tokens of a row in float64."""
    length = int(inputs.lengths[row])
    window = min(window, max(length - 1, 1))
    must = events.marked(inputs.must_keep, row)
    old = [i for i in held_by(inputs, row) if i not in must and i < length - window]
    if not old:
        return {}
    logits = events.window_logits(inputs, row, window)[..., old]
    received = logits.softmax(-1).amax(0).mean(0).tolist()
    reach = kernel // 2
    return {
        token: max(received[max(0, i - reach) : i + reach + 1])
        for i, token in enumerate(old)
    }


@pytest.mark.parametrize("lengths", [events.LENGTHS, SHORT])
@pytest.mark.parametrize("has_admission", [False, True])
@pytest.mark.parametrize(("window", "kernel"), [(WINDOW, 5), (1, 1), (256, 3)])
def test_scores_equal_loops(
    lengths: tuple, has_admission: bool, window: int, kernel: int
) -> None:
    scorer = built(SnapMaxScorer, snapmax_window=window, snapmax_kernel=kernel)
    inputs = events.make_inputs(scorer.needs, lengths=lengths)
    inputs = admit(inputs) if has_admission else inputs
    got = scorer.score(inputs, None)
    assert got.dtype == torch.float32
    for row in product(*map(range, inputs.lengths.shape)):
        want = scores_by_loops(inputs, row, window, kernel)
        highest = max(want.values(), default=0.0)
        for token in range(int(inputs.lengths[row])):
            assert float(got[row][token]) == pytest.approx(
                want.get(token, highest), rel=1e-5
            )


def trimmed_by_loops(
    score: Tensor, inputs: EventInputs, event: int, budget: int, share: float
) -> dict[Row, set[int]]:
    """Drop the lowest share of every head, again and again, as the appendix says."""
    _, layers, heads = inputs.lengths.shape
    rows = list(product([event], range(layers), range(heads)))
    kept = {row: set(held_by(inputs, row)) for row in rows}
    while sum(map(len, kept.values())) > budget * len(rows):
        for row, tokens in kept.items():
            loose = sorted(tokens - events.marked(inputs.must_keep, row))
            left = len(loose) - max(1, int(share * len(loose)))
            stay = best(loose, score[row].tolist(), max(left, 0))
            kept[row] = events.marked(inputs.must_keep, row) | set(stay)
    return kept


@pytest.mark.parametrize("share", [0.1, 0.35, 1.0])
@pytest.mark.parametrize("has_admission", [False, True])
@pytest.mark.parametrize("budget", [52, 60, 75, 110, 160])
def test_trimming_equals_loops(budget: int, has_admission: bool, share: float) -> None:
    inputs = events.make_inputs(Needs())
    inputs = admit(inputs) if has_admission else inputs
    drawn = torch.rand(inputs.must_keep.shape, generator=torch.Generator())
    held = inputs.valid if inputs.candidates is None else inputs.candidates
    score = drawn.masked_fill(~held, -torch.inf)
    got = (
        built(TrimAllocator, trim_share=share).choose(score, inputs, None, budget).keep
    )
    for event in range(events.EVENTS):
        wanted = trimmed_by_loops(score, inputs, event, budget, share)
        for row, tokens in wanted.items():
            assert events.marked(got, row) == tokens


def test_all_heads_lose_the_same_share_and_no_more_tenths_than_it_takes() -> None:
    inputs = events.make_inputs(Needs(), lengths=(((160, 60), (110, 160)),), local=(6,))
    score = torch.rand(inputs.must_keep.shape, generator=torch.Generator())
    keep = built(TrimAllocator, trim_share=0.1).choose(score, inputs, None, 115).keep
    # 490 tokens are above 4 * 115. Less a tenth of 150, 50, 100 and 150 they are not.
    assert keep.sum(-1).tolist() == [[[145, 55], [100, 145]]]


class EveryThird(BaseAdmission):
    """Admits a third of the tokens, by their gates in memory."""

    threshold = 2 / 3

    def gates(self, inputs: EventInputs, token: Tensor) -> Tensor:
        return torch.full(token.shape, 0.5)


def test_after_an_admission_it_chooses_among_admitted_tokens() -> None:
    eviction = factory.build("trim-snapmax", {"snapmax_window": WINDOW})
    policy = AdmittedPolicy(built(EveryThird), eviction)
    inputs = events.make_inputs(policy.needs)
    is_useful = inputs.memory[MEMORY] > 2 / 3
    candidates = inputs.valid & (inputs.must_keep | is_useful)
    got = policy.decide(inputs, 64)
    assert torch.equal(got.keep, eviction.decide(
        replace(inputs, candidates=candidates), 64).keep)  # fmt: skip
    assert not (got.keep & ~candidates).any() and (got.keep | ~inputs.must_keep).all()
    total, most = got.keep.sum((1, 2, 3)), 64 * events.LAYERS * events.HEADS
    held = candidates.sum((1, 2, 3))
    assert (total <= most).all() and (total < held).any()
    assert (total[held <= most] == held[held <= most]).all()
