"""Chains of events over several requests: every head holds its own tokens, in order."""

from collections import Counter
from math import inf
from typing import Any

import pytest

from support.words import built
from support.worker.chain_engine import Chain, Setup
from support.worker.chain_policy import ScriptedPolicy
from vllm_kvpolicy.policies.testing import MovementPolicy, exchanged, shuffled

STEPS = 110
# Name: whether the policy is dynamic and whether it merges, and the setup.
SETUPS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "equal, merged": (False, True, {"is_ragged": False}),
    "equal, shuffled": (False, False, {"is_ragged": False, "place": shuffled}),
    "ragged, columns": (False, True, {"is_ragged": True, "columns": True}),
    "dynamic, late": (True, True, {"is_ragged": True, "latest": 4}),
}
# The roomy pool never preempts, the tight one does all the time.
POOLS = {"roomy": 70, "tight": 26}


@pytest.mark.parametrize("name", SETUPS)
def test_every_head_holds_its_own_tokens(name: str) -> None:
    dynamic, merges, changes = SETUPS[name]
    is_ragged = changes["is_ragged"]
    totals: Counter[str] = Counter()
    for seed, num_blocks in enumerate(POOLS.values()):
        policy = ScriptedPolicy(is_ragged, dynamic, merges)
        setup = Setup(policy, num_blocks=num_blocks, seed=seed, **changes)
        totals += Chain(setup).run(STEPS)
    print(dict(totals))
    assert totals["events"] > 120 and totals["crowded steps"] > 25
    assert totals["finished"] > 20 and totals["preempted"] > 5
    assert (totals["uneven events"] > 60) == is_ragged
    assert (totals["merged tokens"] > 100) == merges
    if is_ragged:
        assert totals["events without survivors of a head"] > 10
    assert (totals["given back"] > 50) == dynamic


def test_batches_fit_their_room() -> None:
    def padded(room: float) -> list[int]:
        """Return the tokens per head of each batch of several events."""
        policy = ScriptedPolicy(True, False)
        Chain(Setup(policy, True, room=room)).run(STEPS)
        return [count * tokens for count, tokens in policy.batches if count > 1]

    free = padded(inf)
    room = sorted(free)[len(free) // 2]
    fitting = padded(room)
    assert max(free) > room >= max(fitting)
    assert len(free) > len(fitting) > 3
    assert padded(0) == []


@pytest.mark.parametrize("place", [shuffled, exchanged])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["equal", "ragged"])
def test_moving_loses_nothing(is_ragged: bool, place: Any) -> None:
    totals: Counter[str] = Counter()
    for num_blocks in (60, 45):
        setup = Setup(
            built(MovementPolicy, ragged=is_ragged),
            is_ragged=is_ragged,
            place=place,
            moves=True,
            num_blocks=num_blocks,
        )
        totals += Chain(setup).run(70)
    assert totals["events"] > 80 and totals["preempted"] > 5, totals
