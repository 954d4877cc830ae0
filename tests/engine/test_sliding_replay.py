"""Beside windows, answers follow from the survivors that the server recorded.

The replay oracle, with the model of transformers as the decoder: layers of full
attention see the recorded survivors, the others their window.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from support.engine.helpers import Engine, Result, make_jobs
from support.engine.oracle_replay import Mismatch, check_replay
from support.made_sliding import MixedDecoder, make_gemma3
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE

BASE = {"budget": 110, "interval": 56, "prefill_interval": 256, "recent": 40}
POLICIES = ["ams-tova", "tova", "snapkv", "streaming", "ams-expected", "h2o", "keydiff"]
OPTIONS = {"expected_window": 48, "allow": POLICIES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def serve(model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return what runs requests, once, in a pool that is too small for all."""

    @cache
    def served(events: str) -> dict[str, Result]:
        return serve_all(model, tmp_path_factory.mktemp("trace"), events)

    return served


def serve_all(model: Path, trace: Path, events: str) -> dict[str, Result]:
    """Serve one request of each policy together; with ALWAYS they preempt."""
    values = {"policy": POLICIES[0], **BASE, "policy_config": OPTIONS}
    values["events"] = events
    lengths = [(37, 180, 300)[number % 3] for number in range(len(POLICIES))]
    jobs = [
        replace(job, name=policy, extra_args={"kv_policy": policy})
        for job, policy in zip(make_jobs(lengths, 150, seed=4), POLICIES, strict=True)
    ]
    changes = {"max_num_batched_tokens": 96, "max_model_len": 640}
    changes["num_blocks"] = 64 if events == ALWAYS else 52
    foresees = events == PRESSURE
    with Engine(model, values, trace, foresees=foresees, **changes) as engine:
        run = engine.run(jobs)
    assert (run.preemptions > 0) == (events == ALWAYS)
    num_cut = sum(bool(result.events) for result in run.results.values())
    assert num_cut >= (3 if events == ALWAYS else 2)
    return run.results


@pytest.fixture(scope="module")
def decoder(model: Path) -> MixedDecoder:
    torch.set_num_threads(1)
    return MixedDecoder(model)


@pytest.mark.parametrize(
    ("events", "policy"),
    [(events, p) for events in (ALWAYS, PRESSURE) for p in POLICIES],
)
def test_answers_follow_from_the_survivors(
    serve, decoder, events: str, policy: str
) -> None:
    result = serve(events)[policy]
    assert result.events or events == PRESSURE
    print(policy, check_replay(decoder, result))


def test_a_token_that_was_not_kept_is_noticed(serve, decoder) -> None:
    """The oracle can fail: with a survivor exchanged in one layer it does."""
    result = serve(ALWAYS)["snapkv"]
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
