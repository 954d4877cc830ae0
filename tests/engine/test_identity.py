"""Moving tokens is free of error: `identity` and `holes` give stock vLLM's tokens."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from support import sweeps
from support.engine.helpers import POLICIES, Engine, Job, Run, make_jobs
from vllm_kvpolicy.config_keys import PRESSURE

# With ragged tables pages change heads and layers, too.
RAGGED = " ragged"
MOVERS = ("identity", "holes", "identity ragged", "holes ragged")
VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256}
LOGPROB_TOLERANCE = 1e-3
MIN_MOVED = 0.5


def named(policy: str) -> dict[str, object]:
    """Return the configuration of a policy as these tests name it."""
    if not policy.endswith(RAGGED):
        return {"policy": policy}
    options = {"ragged": True}
    return {"policy": policy.removesuffix(RAGGED), "policy_config": options}


def plain_jobs() -> list[Job]:
    return make_jobs((40, 90, 150, 300, 410), 130, seed=5)


def jobs_with_aborts() -> list[Job]:
    """Twelve requests that come one after another; every third is aborted."""
    jobs = make_jobs([30 + 37 * i % 290 for i in range(12)], 110, seed=6)
    return [
        replace(job, arrives=8 * i, aborted=(35 + 30 * i) % 100 if i % 3 == 1 else None)
        for i, job in enumerate(jobs)
    ]


SCARCE = {"num_blocks": 36, "max_model_len": 640}
CASES = {
    "plain": (plain_jobs, {}, 15),
    "preemption": (plain_jobs, {**SCARCE, "max_num_batched_tokens": 96}, 15),
    "aborts": (jobs_with_aborts, SCARCE, 15),
}
RUNS = sweeps.paired(MOVERS, CASES)


class Runs:
    """Runs of stock vLLM and of the movers, each made once."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.get = cache(self._run)

    def _run(self, policy: str | None, case: str) -> tuple[Run, dict[str, float]]:
        make, changes, _ = CASES[case]
        values = policy and {**named(policy), **VALUES}
        trace = self.folder / str(policy) / case if policy else None
        with Engine(self.model, values or None, trace, **changes) as engine:
            run = engine.run(make())
            assert engine.num_free == engine.num_usable
            return run, engine.counters() if policy else {}


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory) -> Runs:
    return Runs(tiny_model, tmp_path_factory.mktemp("identity"))


def assert_same_output(run: Run, stock: Run) -> None:
    """Same tokens; log-probabilities of the chosen ones within the tolerance."""
    assert run.results.keys() == stock.results.keys()
    for name, result in run.results.items():
        expected = stock.results[name]
        # Aborts fall on whole steps, so lengths agree too.
        assert result.tokens == expected.tokens, name
        for token, ours, theirs in zip(
            result.tokens, result.logprobs, expected.logprobs, strict=True
        ):
            assert abs(ours[token] - theirs[token]) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(("policy", "case"), RUNS)
def test_tokens_are_those_of_stock(runs: Runs, policy: str, case: str) -> None:
    run, counters = runs.get(policy, case)
    stock, _ = runs.get(None, case)
    assert_same_output(run, stock)
    assert counters["events"] >= CASES[case][2]
    assert counters["tokens_dropped"] == 0


@pytest.mark.parametrize("policy", [mover for mover, c in RUNS if c == "preemption"])
def test_the_tiny_pool_preempts(runs: Runs, policy: str) -> None:
    assert runs.get(policy, "preemption")[0].preemptions > 0
    assert runs.get(None, "preemption")[0].preemptions > 0


@pytest.mark.parametrize(("policy", "case"), RUNS)
def test_most_tokens_moved(runs: Runs, policy: str, case: str) -> None:
    """A mover that moves little would prove little."""
    results = runs.get(policy, case)[0].results.values()
    moved = [
        event.moved
        for result in results
        for events in result.passes
        for event in events
    ]
    assert sum(moved) / len(moved) >= MIN_MOVED


@pytest.mark.parametrize("policy", [mover for mover, c in RUNS if c == "plain"])
def test_heads_are_shuffled_apart(runs: Runs, policy: str) -> None:
    """Different (layer, head) pairs hold the same tokens in different places."""
    results = runs.get(policy, "plain")[0].results.values()
    for event in [event for result in results for event in result.events]:
        survivors = event.survivors.reshape(-1, event.survivors.shape[-1])
        assert all(sorted(row) == list(range(event.frontier)) for row in survivors)
        assert len({tuple(row) for row in survivors}) == len(survivors)


NEVER_BINDS = {"budget": 2048, "interval": 64}
NEVER_CALLED = {**VALUES, "events": PRESSURE}  # test_prefix_caching.py has all others
STOCK = [(p, NEVER_BINDS) for p in sweeps.some(("adakv-snapkv", *POLICIES, *MOVERS))]
STOCK += [("epikv", {**NEVER_CALLED, "budget": 68})]


@pytest.mark.parametrize(("policy", "values"), STOCK)
def test_what_never_cuts_is_stock(
    runs: Runs, tiny_model: Path, policy: str, values: dict[str, object]
) -> None:
    """A budget that never binds, and a pool with room in which no event is called."""
    values = {**named(policy), **values}
    with Engine(tiny_model, values) as engine:
        run = engine.run(plain_jobs())
        counters = engine.counters()
    stock, _ = runs.get(None, "plain")
    assert_same_output(run, stock)
    assert counters["events"] == 0
    assert run.steps == stock.steps
