"""R-KV as plain loops over a ragged batch, down to requests shorter than the window."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from support import event_inputs as events
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.names import SCORERS
from vllm_kvpolicy.policies.scorers.rkv import RKVScorer

SHORT = (((9, 8), (7, 2)), ((8, 3), (9, 6)), ((4, 9), (5, 2)))


def by_loops(
    scorer: RKVScorer, inputs: EventInputs, row: tuple[int, int, int]
) -> list[float]:
    """Score one row in float64."""
    event, layer, head = row
    length = int(inputs.lengths[row])
    window = min(scorer.needs.window_tokens, length - 1)
    older = length - window
    keys = inputs.keys[row][:length].double()
    group = slice(head * events.GROUP, (head + 1) * events.GROUP)
    queries = inputs.queries[event, layer, group, -window:].double()
    logits = (queries @ keys[:older].T * inputs.scale).amax(0)
    attention = logits.softmax(-1).mean(0).tolist()

    cosine = torch.nn.functional.normalize(keys, dim=-1)
    cosine = (cosine @ cosine.T).fill_diagonal_(0).tolist()
    for line in cosine:
        similar = [j for j, c in enumerate(line) if c > scorer.options.rkv_threshold]
        line[max(similar, default=0)] = 0
    similar = torch.tensor(cosine).mean(0).softmax(0).tolist()

    reach, weight = scorer.options.rkv_kernel // 2, scorer.options.rkv_lambda
    score = [
        weight * max(attention[max(0, i - reach) : i + reach + 1])
        - (1 - weight) * similar[i]
        for i in range(older)
    ]
    return score + [max(score)] * window


@pytest.mark.parametrize("lengths", [events.LENGTHS, SHORT])
@pytest.mark.parametrize(
    "scorer",
    [
        SCORERS["rkv"].build({}),
        RKVScorer(rkv_window=16, rkv_kernel=3, rkv_lambda=0.4, rkv_threshold=0.1),
        RKVScorer(rkv_window=1, rkv_kernel=1, rkv_lambda=1.0, rkv_threshold=0.9),
    ],
)
def test_equals_loops(scorer: RKVScorer, lengths: tuple) -> None:
    inputs = events.make_inputs(scorer.needs, lengths=lengths)
    inputs.keys[:, :, :, 1] = 0.0  # like no other key, nor itself
    got = scorer.score(inputs, None)
    assert got.dtype == torch.float32
    for row in product(*map(range, inputs.lengths.shape)):
        want = by_loops(scorer, inputs, row)
        torch.testing.assert_close(
            got[row][: len(want)].double(), torch.tensor(want).double()
        )


def test_only_the_newest_queries_count() -> None:
    scorer = SCORERS["rkv"].build({})
    inputs = events.make_inputs(scorer.needs, window=20)
    few = replace(inputs, queries=inputs.queries[..., -8:, :])
    assert torch.equal(
        *(scorer.score(some, None).nan_to_num() for some in (inputs, few))
    )


def test_a_request_of_one_token_has_a_score() -> None:
    scorer = SCORERS["rkv"].build({})
    inputs = events.make_inputs(scorer.needs, lengths=(((1, 1),),), local=(1,))
    assert not scorer.score(inputs, None)[..., 0].isnan().any()


def test_options_reach_the_scorer() -> None:
    options = {"rkv_window": 9, "rkv_kernel": 5, "rkv_lambda": 0.2}
    options |= {"rkv_threshold": 0.3}
    scorer = factory.build("rkv", options).scorer
    assert dict(scorer.options) == options and scorer.needs.window_tokens == 9
    assert vars(factory.build("rkv").scorer) == vars(SCORERS["rkv"].build({}))
