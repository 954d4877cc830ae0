"""Beside windows, answers follow from the survivors that the server recorded.

The replay oracle, with the model of transformers as the decoder: layers of full
attention see the recorded survivors, the others their window.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.engine.helpers import Engine, make_jobs
from support.engine.oracle_replay import Mismatch, check_replay
from support.made_sliding import MixedDecoder, make_gemma3

BASE = {"budget": 110, "interval": 56, "prefill_interval": 256, "recent": 40}
POLICIES = ["ams-tova", "tova", "snapkv", "streaming", "ams-expected", "h2o", "keydiff"]
OPTIONS = {"expected_window": 48, "allow": POLICIES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory):
    """One request of each policy, together in a pool in which they preempt."""
    values = {"policy": POLICIES[0], **BASE, "policy_config": OPTIONS}
    lengths = [(37, 180, 300)[number % 3] for number in range(len(POLICIES))]
    jobs = [
        replace(job, name=policy, extra_args={"kv_policy": policy})
        for job, policy in zip(make_jobs(lengths, 150, seed=4), POLICIES, strict=True)
    ]
    changes = {"max_num_batched_tokens": 96, "num_blocks": 64, "max_model_len": 640}
    trace = tmp_path_factory.mktemp("trace")
    with Engine(model, values, trace, foresees=False, **changes) as engine:
        run = engine.run(jobs)
    assert run.preemptions > 0
    return run.results


@pytest.fixture(scope="module")
def decoder(model: Path) -> MixedDecoder:
    torch.set_num_threads(1)
    return MixedDecoder(model)


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_follow_from_the_survivors(results, decoder, policy: str) -> None:
    result = results[policy]
    assert len(result.events) >= 1
    print(policy, check_replay(decoder, result))


def test_a_token_that_was_not_kept_is_noticed(results, decoder) -> None:
    """The oracle can fail: with a survivor exchanged in one layer it does."""
    result = results["snapkv"]
    event = result.events[-1]
    kept = event.survivors[1]
    gone = sorted(set(range(event.frontier)) - set(kept.flatten().tolist()))
    assert gone
    before = kept.copy()
    try:
        kept[:, -32:] = gone[0]
        with pytest.raises(Mismatch):
            check_replay(decoder, result)
    finally:
        kept[:] = before
