"""What the server keeps is what the references keep, event by event, head by head."""

from functools import cache

import pytest

from support.engine.helpers import POLICIES
from support.engine.oracle_selection import Report, check_selection

CASES = [(policy, name) for policy in POLICIES for name in ("tight", "aligned")]
CASES += [("ams-tova", "wide"), ("snapkv", "wide")]


@cache
def examine(oracle_runs, policy: str, scenario: str) -> Report:
    case = oracle_runs.get(policy, scenario)
    report = Report()
    for result in case.run.results.values():
        check_selection(case.decoder, result, case.config, case.block_size, report)
    return report


@pytest.mark.parametrize(("policy", "scenario"), CASES)
def test_decisions_are_those_of_the_references(
    oracle_runs, policy: str, scenario: str
) -> None:
    report = examine(oracle_runs, policy, scenario)
    print(f"{policy} {scenario}: {report.decisions} decisions", *report.near_ties)
    assert report.decisions >= 40


def test_near_ties_are_rare(oracle_runs) -> None:
    """All cases together: at most 0.1 % of decisions differ, all at near ties."""
    total = Report()
    for policy, scenario in CASES:
        report = examine(oracle_runs, policy, scenario)
        total.decisions += report.decisions
        total.near_ties += report.near_ties
    total.check()
    assert total.decisions >= 1000
