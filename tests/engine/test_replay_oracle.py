"""A dense decoder that sees only the recorded survivors gives the server's numbers."""

import pytest

from support.engine.helpers import MOVERS, POLICIES
from support.engine.oracle_replay import check_replay

CASES = [
    (policy, name) for policy in POLICIES + MOVERS for name in ("tight", "aligned")
]
CASES += [("ams-tova", "wide"), ("snapkv", "wide")]


@pytest.mark.parametrize(("policy", "scenario"), CASES)
def test_log_probabilities_are_those_of_the_replay(
    oracle_runs, policy: str, scenario: str
) -> None:
    case = oracle_runs.get(policy, scenario)
    results = case.run.results
    worst = max(check_replay(case.decoder, result) for result in results.values())
    print(f"{policy} {scenario}: largest difference {worst:.1e}")
    assert all(result.prompt_logprobs for result in results.values())
    assert any(result.events for result in results.values())


@pytest.mark.parametrize("policy", POLICIES + MOVERS)
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
