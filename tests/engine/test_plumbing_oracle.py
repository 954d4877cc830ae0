"""Every word of the package on one server: what it selects, and what it answers.

Requests choose their policies by name; chunked prompts, events inside prompts and
preemptions included, or events that are called for. See oracle_plumbing and
oracle_replay.
"""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from support.calibration_files import options_for
from support.engine.helpers import Engine, Job, Result, Run, config_of, make_prompt
from support.engine.oracle_plumbing import check_plumbing
from support.engine.oracle_replay import Mismatch, check_replay
from support.engine.oracle_selection import Report
from support.engine.reference_decoder import ReferenceDecoder
from support.sweeps import covering, evictions
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE

BASE = {
    "budget": 150,
    "interval": 130,
    "prefill_interval": 256,
    "recent": 40,
    "sinks": 5,
}
ENGINE = {"max_num_batched_tokens": 128, "max_model_len": 832}
ALL = covering(evictions())
# With `always` requests preempt each other.
POOLS = {ALWAYS: {"num_blocks": 60, "foresees": False}, PRESSURE: {"num_blocks": 120}}
CASES = [(events, name) for events in POOLS for name in ALL]


def jobs_for(policies: list[str]) -> list[Job]:
    return [
        Job(
            name,
            make_prompt(7000 + number, (37, 180, 300, 430)[number % 4]),
            290,
            extra_args={"kv_policy": name},
            prompt_logprobs=True,
        )
        for number, name in enumerate(policies)
    ]


@pytest.fixture(scope="module")
def serve(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Return what runs all policies, once, and their server's configuration."""

    @cache
    def served(events: str) -> tuple[Run, KVPolicyConfig]:
        trace = tmp_path_factory.mktemp("trace")
        options = {"expected_window": 48, "snapmax_window": 48, "allow": ALL}
        for scorer in ("triattention", "qfilter"):
            options |= options_for(scorer, trace, 2, 2, 2, 32)
        values = {"policy": ALL[0], **BASE, "policy_config": options, "events": events}
        with Engine(tiny_model, values, trace, **ENGINE, **POOLS[events]) as engine:
            return engine.run(jobs_for(ALL)), config_of(values)

    return served


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> ReferenceDecoder:
    return ReferenceDecoder(tiny_model)


@pytest.mark.parametrize("events", POOLS)
def test_the_run_strains_the_engine(serve, events: str) -> None:
    run, _ = serve(events)
    results = run.results
    assert (run.preemptions > 0) == (events == ALWAYS)
    assert all(len(result.events) >= 1 for result in results.values())
    held = [e.survivors for r in results.values() for e in r.events]
    assert any((rows < 0).any() for rows in held)  # heads of different lengths


@pytest.mark.parametrize(("events", "name"), CASES)
def test_answers_follow_from_the_survivors(
    serve, decoder: ReferenceDecoder, events: str, name: str
) -> None:
    check_replay(decoder, serve(events)[0].results[name])


def plumbing(
    decoder: ReferenceDecoder, server: KVPolicyConfig, result: Result
) -> Report:
    """Return what the oracle says about a request."""
    config = server.with_request(result.job.extra_args, 32)
    assert config is not None
    if config.protects_prompt:
        prompt = len(result.job.prompt)
        config = replace(config, budget_tokens=config.budget_tokens + prompt)
    report = Report()
    check_plumbing(decoder, result, config, config.resolved().options, 32, report)
    report.check()
    return report


# The model's keys all have one length: knorm sees ties only.
@pytest.mark.parametrize(
    ("events", "name"), [case for case in CASES if "knorm" not in case[1]]
)
def test_selection_is_the_policys(
    serve, decoder: ReferenceDecoder, events: str, name: str
) -> None:
    run, server = serve(events)
    assert plumbing(decoder, server, run.results[name]).decisions > 0


@pytest.mark.parametrize("mistake", ["heads swapped", "tokens of their neighbours"])
def test_a_wrong_selection_is_noticed(
    serve, decoder: ReferenceDecoder, mistake: str
) -> None:
    """Seeded faults in pages, memory, positions and signals are left to others."""
    name = next(name for name in ALL if name.endswith("snapkv"))
    run, server = serve(ALWAYS)
    result = run.results[name]
    passes = deepcopy(result.passes)
    for event in passes[-1]:
        swapped, shifted = event.selected[:, ::-1].copy(), event.selected - 1
        event.selected[:] = swapped if mistake == "heads swapped" else shifted
    with pytest.raises(Mismatch, match="selected differ"):
        plumbing(decoder, server, replace(result, passes=passes))
