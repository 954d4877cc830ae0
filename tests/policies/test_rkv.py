"""R-KV at events: which queries count, short requests, keys of zeros, options."""

from dataclasses import replace

import pytest
import torch

from support import event_inputs as events
from support.words import built
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.names import SCORERS
from vllm_kvpolicy.policies.scorers.rkv import redundancy


def test_only_the_newest_queries_count() -> None:
    scorer = built(SCORERS["rkv"])
    inputs = events.make_inputs(scorer.needs, window=20)
    few = replace(inputs, queries=inputs.queries[..., -8:, :])
    assert torch.equal(
        *(scorer.score(some, None).nan_to_num() for some in (inputs, few))
    )


def test_a_request_of_one_token_has_a_score() -> None:
    scorer = built(SCORERS["rkv"])
    inputs = events.make_inputs(scorer.needs, lengths=(((1, 1),),), local=(1,))
    assert not scorer.score(inputs, None)[..., 0].isnan().any()


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
def test_redundancy_equals_its_definition(threshold: float) -> None:
    keys = torch.randn(2, 3, 30, 8, generator=torch.Generator().manual_seed(0))
    keys[:, :, 7] = 0.0  # like no other key, nor itself
    unit = torch.nn.functional.normalize(keys, dim=-1)
    cosine = unit @ unit.mT * (1 - torch.eye(30))
    last = torch.where(cosine > threshold, torch.arange(30), 0).amax(-1, keepdim=True)
    want = cosine.scatter(-1, last, 0.0).mean(-2).softmax(-1)
    got = redundancy(threshold, keys, torch.ones(2, 3, 30, dtype=torch.bool))
    torch.testing.assert_close(got, want)


def test_options_reach_the_scorer() -> None:
    options = {"rkv_window": 9, "rkv_kernel": 5, "rkv_lambda": 0.2}
    options |= {"rkv_threshold": 0.3}
    scorer = factory.build("rkv", options).scorer
    assert dict(scorer.options) == options and scorer.needs.window_tokens == 9
    assert vars(factory.build("rkv").scorer) == vars(built(SCORERS["rkv"]))
