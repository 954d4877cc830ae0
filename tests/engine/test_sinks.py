"""gpt-oss: learned sinks beside sliding windows.

Moving tokens gives stock vLLM's tokens, answers follow from the recorded survivors, and
the model's sinks reach every measurement of attention.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.engine.helpers import BLOCK, Engine, Run, footprint_of, jobs_of, make_jobs
from support.engine.oracle_replay import Mismatch, check_replay
from support.made_sinks import NUM_FULL, PATTERN, make_gpt_oss
from support.made_sliding import MixedDecoder
from vllm_kvpolicy.kernels.window_usage import WindowUsage, window_usage
from vllm_kvpolicy.policies import compose

VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256}
LENGTHS = (40, 300)
POLICIES = ["ams-tova", "tova", "snapkv", "streaming", "h2o"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory):
    @cache
    def run(policy: str | None, budget: int = 128) -> tuple[Run, dict]:
        values = policy and {"policy": policy, **VALUES, "budget": budget}
        trace = tmp_path_factory.mktemp("trace") if policy else None
        with Engine(model, values or None, trace, max_num_batched_tokens=96) as engine:
            outcome = engine.run(make_jobs(LENGTHS, 150, seed=5))
            assert engine.num_free == engine.num_usable
            return outcome, engine.counters() if policy else {}

    return run


def test_moving_is_free_of_error(runs) -> None:
    run, counters = runs("identity")
    run.check_answers(runs(None)[0])
    assert counters["events"] >= 5 and not counters["tokens_dropped"]
    events = [event for result in run.results.values() for event in result.events]
    assert sum(event.moved for event in events) / len(events) > 0.5
    assert {event.survivors.shape[:2] for event in events} == {(NUM_FULL, 2)}


def test_a_budget_that_never_binds_is_stock(runs) -> None:
    run, counters = runs("ams-tova", 2048)
    run.check_answers(runs(None)[0])
    assert not counters["events"]


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory):
    """One request of each policy, together."""
    values = {"policy": POLICIES[0], **VALUES, "policy_config": {"allow": POLICIES}}
    jobs = jobs_of(POLICIES, [180], 120)
    trace = tmp_path_factory.mktemp("trace")
    with Engine(model, values, trace, max_num_batched_tokens=96) as engine:
        return engine.run(jobs).results


@pytest.fixture(scope="module")
def decoder(model: Path) -> MixedDecoder:
    torch.set_num_threads(1)
    return MixedDecoder(model)


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_follow_from_the_survivors(results, decoder, policy: str) -> None:
    result = results[f"{policy} 180"]
    assert len(result.events) >= 1
    print(policy, check_replay(decoder, result))


def test_answers_do_not_follow_without_sinks(results, model: Path) -> None:
    """The oracle can fail: with sinks that take nothing it does."""
    decoder = MixedDecoder(model)
    for layer in decoder.model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    with pytest.raises(Mismatch):
        check_replay(decoder, results["tova 180"])


def test_what_is_held_is_bounded_and_sinks_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention reaches exactly its bound; windows stay within theirs.

    Events measure attention with the sinks of the layers of full attention, and with
    others as soon as these are loaded in place.
    """
    found = []

    def noting(*args: Any) -> WindowUsage:
        found.append(args[5])
        return window_usage(*args)

    monkeypatch.setattr(compose, "window_usage", noting)
    values = {"policy": "ams-tova", **VALUES}
    own, beside = [], []
    (job,) = make_jobs((400,), 80, seed=12)
    with Engine(model, values, max_num_batched_tokens=96) as engine:
        manager = engine.scheduler.kv_policy_manager

        def note(engine: Engine) -> None:
            for request_id in engine.scheduler.kv_policy_planner.states:
                beside.append(manager.sliding.held(request_id))
                own.append(manager.num_held(request_id) - beside[-1])

        engine.run([job], note)
        most = manager.sliding.sizes.most_blocks
        before = found[:]
        named = engine.worker.get_model().named_parameters()
        more = [(name, each + 1) for name, each in named if name.endswith("sinks")]
        loaded = {"weights_iterator": more, "is_checkpoint_format": False}
        with torch.no_grad():
            engine.llm.collective_rpc("reload_weights", kwargs=loaded)
        engine.run([job])
    tokens = 400 + 80 - 1
    assert max(own) == footprint_of(values, job).peak_blocks(tokens)
    assert max(own) < -(-tokens // BLOCK)
    assert 0 < max(beside) <= most(tokens)
    after = found[len(before) :]
    weights = load_file(model / "model.safetensors")
    full = [i for i, kind in enumerate(PATTERN) if kind]
    want = torch.stack([weights[f"model.layers.{i}.self_attn.sinks"] for i in full])
    assert before and all(torch.equal(got, want) for got in before)
    assert after and all(torch.equal(got, want + 1) for got in after)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("rkv", "attention of a policy's own"),
        ("rpc", "attention of a policy's own"),
        ("expected", "attention of a policy's own"),
        ("adakv-snapkv", "per-head lengths"),
    ],
)
def test_what_does_not_take_sinks_is_refused(model, policy: str, words: str) -> None:
    options = {"expected_window": 40} if policy == "expected" else {}
    values = {"policy": policy, **VALUES, "policy_config": options}
    with pytest.raises(ValueError, match=words):
        Engine(model, values, max_num_batched_tokens=96)
