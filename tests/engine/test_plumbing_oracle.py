"""Every word of the package on one server: what it selects, and what it answers.

Requests choose their policies by name; chunked prompts, events inside prompts and
preemptions included, or events that are called for, or FP8 caches with scales. See
oracle_plumbing and oracle_replay.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.calibration_files import options_for
from support.cpu import needs_float8
from support.engine.float8_oracle import (
    SCALES,
    STORED,
    RoundedCache,
    check_storage,
    run_and_see,
    scaled_cache,
)
from support.engine.helpers import BLOCK, Engine, Run, config_of, one_job_each, serve
from support.engine.oracle_plumbing import check_plumbing
from support.engine.oracle_replay import check_replay
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
POOLS: dict[str, dict[str, Any]] = {
    ALWAYS: {"num_blocks": 60, "foresees": False},
    PRESSURE: {"num_blocks": 130},
    "fp8": {"num_blocks": 1500, "kv_cache_dtype": "fp8"},
    "fp8_e5m2": {"num_blocks": 130, "kv_cache_dtype": "fp8_e5m2"},
}
CALLED = PRESSURE, "fp8_e5m2"
CASES = [
    pytest.param(case, name, marks=needs_float8 if case in STORED else ())
    for case in POOLS
    for name in ALL
]


@dataclass
class Served:
    """What a server gave, its configuration, and what an FP8 cache stored, by name."""

    case: str
    run: Run
    config: KVPolicyConfig
    stored: dict[str, torch.Tensor]

    def decoder(self, plain: ReferenceDecoder, name: str) -> ReferenceDecoder:
        """Return a decoder with the cache of a request."""
        if not self.stored:
            return plain
        decoder = copy(plain)
        decoder.cached = RoundedCache(STORED[self.case], self.stored[name], SCALES)
        return decoder


Serve = Callable[[str], Served]


@pytest.fixture(scope="module")
def server(tiny_model: Path, decoder, tmp_path_factory) -> Serve:
    """Return what runs all policies, once."""

    @cache
    def served(case: str) -> Served:
        trace = tmp_path_factory.mktemp("trace")
        options = {"expected_window": 48, "snapmax_window": 48, "allow": ALL}
        for scorer in ("triattention", "qfilter"):
            options |= options_for(scorer, trace, 2, 2, 2, 32)
        values = {"policy": ALL[0], **BASE, "policy_config": options}
        values["events"] = PRESSURE if case in CALLED else ALWAYS
        jobs = one_job_each(ALL, (37, 180, 300, 430), 290, prompt_logprobs=True)
        changes, config = {**ENGINE, **POOLS[case]}, config_of(values)
        if case not in STORED:
            run = serve(tiny_model, values, jobs, trace, **changes)
            return Served(case, run, config, {})
        with scaled_cache(SCALES):
            engine = Engine(tiny_model, values, trace, **changes)
        with engine:
            check_storage(engine, case)
            scales = engine.runtime.compactor.pool.float8.scales
            assert tuple(map(tuple, scales.values())) == SCALES
            run, stored = run_and_see(engine, jobs, decoder)
        return Served(case, run, config, stored)

    return served


@pytest.mark.parametrize("case", [ALWAYS, PRESSURE])
def test_the_run_strains_the_engine(server: Serve, case: str) -> None:
    run = server(case).run
    assert (run.preemptions > 0) == (case == ALWAYS)
    assert all(result.events for result in run.results.values())
    rows = [event.survivors for event in run.events]
    assert any((each < 0).any() for each in rows)  # heads of different lengths


@pytest.mark.parametrize(("case", "name"), CASES)
def test_answers_follow_from_the_survivors(
    server: Serve, decoder: ReferenceDecoder, case: str, name: str
) -> None:
    served = server(case)
    assert served.run.results[name].events
    check_replay(served.decoder(decoder, name), served.run.results[name])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=needs_float8 if case in STORED else ())
        for case in POOLS
    ],
)
def test_selections_are_the_policies(
    server: Serve, decoder: ReferenceDecoder, case: str
) -> None:
    """All names together: one near tie may be chance, one of each name is none."""
    served, report = server(case), Report()
    for name in ALL:
        # The model's keys all have one length, which sees ties only, but for what FP8
        # rounds.
        if "knorm" in name and case not in STORED:
            continue
        config = served.config.with_request({"kv_policy": name}, BLOCK)
        options = config.resolved().options
        before, own = report.decisions, served.decoder(decoder, name)
        check_plumbing(own, served.run.results[name], config, options, BLOCK, report)
        assert report.decisions > before, name
    report.check()
