"""Checks the servers of a serving comparison before anything is timed."""

import asyncio
from collections.abc import Mapping

from benchmarks.load import run_one_by_one
from benchmarks.scenarios import AMPLE, STOCK, Scenario
from benchmarks.server import Server
from benchmarks.workload import Workload

CHECKED_PROMPTS = 2
VERIFICATION_ROUND = -1
NO_POLICY = {"kv_policy": "none"}

Outputs = list[list[int]]


class VerificationError(Exception):
    """A server does not behave as the comparison requires."""


def verify(
    scenario: Scenario, workload: Workload, servers: Mapping[str, Server]
) -> list[str]:
    """Check the servers of a scenario.

    Args:
        scenario: the scenario that they were started for.
        workload: its requests.
        servers: by name; with AMPLE if the scenario is pressed.

    Returns:
        One sentence for each check that passed.

    Raises:
        VerificationError: a check failed.
    """
    prompts = workload.prompts(VERIFICATION_ROUND)[:CHECKED_PROMPTS]

    def outputs(name: str, extra: dict[str, str] | None = None) -> Outputs:
        url = servers[name].url
        return asyncio.run(run_one_by_one(url, prompts, workload.output_tokens, extra))

    passed = []
    before = {name: servers[name].metrics() for name in scenario.policies}
    found = {name: outputs(name) for name in servers}
    passed.append(
        f"{', '.join(found)}: exactly {workload.output_tokens} tokens per request"
    )
    if scenario.is_pressed:
        passed.append(_same(found, AMPLE, STOCK))
    for policy in scenario.policies:
        after = servers[policy].metrics()
        events = _grown("kvpolicy_events_total", before[policy], after)
        returned = _grown("kvpolicy_blocks_returned_total", before[policy], after)
        if scenario.budget is None:
            passed.append(_same(found, STOCK, policy))
            passed.append(
                _expect(not events, f"{policy}: {events:.0f} events, wanted 0")
            )
            continue
        counts = f"{policy}: {events:.0f} events, {returned:.0f} blocks returned"
        passed.append(_expect(min(events, returned) > 0, counts))
        label = f"{policy} without its policy"
        found[label] = outputs(policy, NO_POLICY)
        passed.append(_same(found, STOCK, label))
    return passed


def _grown(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return how much a series grew; a missing series is an error."""
    if name not in after:
        raise VerificationError(f"/metrics has no {name}")
    return after[name] - before.get(name, 0.0)


def _same(found: Mapping[str, Outputs], expected: str, name: str) -> str:
    """Return a sentence if all tokens are equal, else raise."""
    for number, pair in enumerate(zip(found[name], found[expected], strict=True)):
        tokens = zip(*pair, strict=True)
        differs = [i for i, (ours, theirs) in enumerate(tokens) if ours != theirs]
        if differs:
            raise VerificationError(
                f"{name} and {expected} differ in request {number} from output token "
                f"{differs[0]} on"
            )
    return f"{name}: tokens as {expected}"


def _expect(holds: bool, sentence: str) -> str:
    """Return the sentence if the check holds, else raise it."""
    if not holds:
        raise VerificationError(sentence)
    return sentence
