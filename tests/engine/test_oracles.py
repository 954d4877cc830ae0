"""What the server keeps is what the references keep, and its answers follow from it.

The runs are those of `support.engine.scenarios`, each made once for all tests of this
file: a dense decoder that sees only the recorded survivors gives the server's numbers;
the survivors are, event by event and head by head, those of the references; and a
preempted request has the same events again.
"""

from functools import cache

import pytest

from support import sweeps
from support.engine.helpers import MOVERS, POLICIES
from support.engine.oracle_replay import check_replay
from support.engine.oracle_selection import Report, check_selection

# Policies take turns at the first two scenarios.
FIRST = ("tight", "aligned")
REPLAYS = [
    (policy, name)
    for turn, policy in enumerate(POLICIES + MOVERS)
    for name in (FIRST if sweeps.every_name else FIRST[turn % 2 :: 2])
]
TIGHT = [policy for policy, name in REPLAYS if name == "tight"]
REPLAYS += [("ams-tova", "wide"), ("snapkv", "warm")]
if sweeps.every_name:
    REPLAYS += [("snapkv", "wide"), ("ams-tova", "warm"), ("streaming", "warm")]


@pytest.mark.parametrize(("policy", "scenario"), REPLAYS)
def test_log_probabilities_are_those_of_the_replay(
    oracle_runs, policy: str, scenario: str
) -> None:
    case = oracle_runs.get(policy, scenario)
    results = case.run.results
    worst = max(check_replay(case.decoder, result) for result in results.values())
    print(f"{policy} {scenario}: largest difference {worst:.1e}")
    assert all(result.prompt_logprobs for result in results.values()) or (
        scenario == "warm"
    )
    assert any(result.events for result in results.values())


@pytest.mark.parametrize("policy", TIGHT)
def test_the_tight_case_is_tight(oracle_runs, policy: str) -> None:
    """It has preemptions, events inside prompts, and several requests at once."""
    run = oracle_runs.get(policy, "tight").run
    in_prompt = [
        event
        for result in run.results.values()
        for event in result.events
        if event.position < len(result.job.prompt)
    ]
    assert run.preemptions > 0
    assert in_prompt
    assert len(run.results) == 6


DECISIONS = [(policy, name) for policy, name in REPLAYS if policy in POLICIES]


@cache
def examine(oracle_runs, policy: str, scenario: str) -> Report:
    case = oracle_runs.get(policy, scenario)
    report = Report()
    for result in case.run.results.values():
        check_selection(case.decoder, result, case.config, case.block_size, report)
    return report


@pytest.mark.parametrize(("policy", "scenario"), DECISIONS)
def test_decisions_are_those_of_the_references(
    oracle_runs, policy: str, scenario: str
) -> None:
    report = examine(oracle_runs, policy, scenario)
    print(f"{policy} {scenario}: {report.decisions} decisions", *report.near_ties)
    assert report.decisions >= 40


def test_near_ties_are_rare(oracle_runs) -> None:
    """All cases together: at most 0.1 % of decisions differ, all at near ties."""
    total = Report()
    for policy, scenario in DECISIONS:
        report = examine(oracle_runs, policy, scenario)
        total.decisions += report.decisions
        total.near_ties += report.near_ties
    total.check()
    assert total.decisions >= (1000 if sweeps.every_name else 500)


@pytest.mark.parametrize("policy", [each for each in TIGHT if each in POLICIES])
def test_survivors_are_the_same_after_a_preemption(oracle_runs, policy: str) -> None:
    """Every event that a preempted request had, it has again, with the same outcome."""
    results = oracle_runs.get(policy, "tight").run.results.values()
    repeated = differ = 0
    for result in results:
        for events in result.passes[:-1]:
            for before in events:
                after = result.events[before.ordinal]
                assert before.position == after.position
                for name in ("selected", "survivors"):
                    unequal = getattr(before, name) != getattr(after, name)
                    differ += int(unequal.any(-1).sum())
                repeated += 1
    assert repeated > 0
    assert differ == 0
