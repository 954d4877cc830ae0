"""R-KV at events: which queries count, short requests, keys of zeros, options."""

from dataclasses import replace

import pytest
import torch

from support import event_inputs as events
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.names import SCORERS


def test_only_the_newest_queries_count() -> None:
    scorer = SCORERS["rkv"].build({})
    inputs = events.make_inputs(scorer.needs, window=20)
    few = replace(inputs, queries=inputs.queries[..., -8:, :])
    assert torch.equal(
        *(scorer.score(some, None).nan_to_num() for some in (inputs, few))
    )


@pytest.mark.parametrize("length", [1, 9])
def test_keys_of_zeros_and_short_requests_have_a_score(length: int) -> None:
    scorer = SCORERS["rkv"].build({})
    inputs = events.make_inputs(scorer.needs, lengths=(((length, 1),),), local=(1,))
    inputs.keys[:, :, :, 1] = 0.0  # like no other key, nor itself
    assert scorer.score(inputs, None)[inputs.valid].isfinite().all()


def test_options_reach_the_scorer() -> None:
    options = {"rkv_window": 9, "rkv_kernel": 5, "rkv_lambda": 0.2}
    options |= {"rkv_threshold": 0.3}
    scorer = factory.build("rkv", options).scorer
    assert dict(scorer.options) == options and scorer.needs.window_tokens == 9
    assert vars(factory.build("rkv").scorer) == vars(SCORERS["rkv"].build({}))
