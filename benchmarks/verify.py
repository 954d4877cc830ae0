"""Checks the servers of a serving comparison before anything is timed.

What must hold is a scenario's: `vllm-kvpolicy verify` checks one server, or a model.
"""

import asyncio
from collections.abc import Mapping

from benchmarks.caching_scenarios import CachingScenario, named
from benchmarks.columns import COUNTERS
from benchmarks.load import run_one_by_one
from benchmarks.scenarios import AMPLE, STOCK, Scenario
from benchmarks.server import Server
from benchmarks.shared_prompts import Cached
from benchmarks.workload import Workload
from vllm_kvpolicy.commands.judge import first_difference
from vllm_kvpolicy.config_keys import PRESSURE

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


def verify_caching(
    scenario: CachingScenario, workload: Cached, servers: Mapping[str, Server]
) -> list[str]:
    """Check the servers of a scenario in which prompts begin alike; see `verify`.

    Stock must find tokens in its prefix cache, and policies must have events, or none
    where these are called when the pool runs short: one request alone has room. In
    float32 and at one block size, servers without a policy and requests without one
    give the same tokens, whether a cache had their beginning or not. Otherwise a last
    bit decides.
    Servers that did not start, where the scenario allows it, are not checked.
    """
    few = workload.few()

    def outputs(name: str, extra: dict[str, str] | None = None) -> Outputs:
        server = servers[name]
        work = few.play(server.url, VERIFICATION_ROUND, server.metrics, extra)
        return [completion.token_ids for completion in asyncio.run(work)[0]]

    passed = []
    found = {}
    with_policy = [
        name
        for p in scenario.policies
        for share in scenario.shares
        if (name := named(p, share)) in servers
    ]
    cached = [named(STOCK, share) for share in scenario.shares]
    for name, server in servers.items():
        before = server.metrics()
        found[name] = outputs(name)
        after = server.metrics()
        hits = _grown(COUNTERS["hit_tokens"], before, after)
        asked = _grown(COUNTERS["queried_tokens"], before, after)
        sentence = f"{name}: {hits:.0f} of {asked:.0f} prompt tokens found in the cache"
        passed.append(_expect(hits > 0 or name not in cached, sentence))
        if name in with_policy:
            events = _grown(COUNTERS["events"], before, after)
            returned = _grown(COUNTERS["blocks_returned"], before, after)
            counts = f"{name}: {events:.0f} events, {returned:.0f} blocks returned"
            if PRESSURE in server.arguments:
                passed.append(_expect(not events, f"{counts}, wanted none"))
            else:
                passed.append(_expect(min(events, returned) > 0, counts))
    if scenario.compares_tokens:
        for name in with_policy:
            found[f"{name} without its policy"] = outputs(name, NO_POLICY)
        others = [name for name in found if name not in (*with_policy, cached[0])]
        passed += [_same(found, cached[0], name) for name in others]
    return passed


def _grown(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return how much a series grew; a missing series is an error."""
    if name not in after:
        raise VerificationError(f"/metrics has no {name}")
    return after[name] - before.get(name, 0.0)


def _same(found: Mapping[str, Outputs], expected: str, name: str) -> str:
    """Return a sentence if all tokens are equal, else raise."""
    place = first_difference(found[expected], found[name])
    if place is not None:
        raise VerificationError(
            f"{name} and {expected} differ in request {place[0]} from output token "
            f"{place[1]} on"
        )
    return f"{name}: tokens as {expected}"


def _expect(holds: bool, sentence: str) -> str:
    """Return the sentence if the check holds, else raise it."""
    if not holds:
        raise VerificationError(sentence)
    return sentence
