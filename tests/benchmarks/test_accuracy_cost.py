"""Tests of costs: windows, what servers say that events dropped, selections."""

import pytest

from benchmarks.accuracy.cost import (
    FROM_LENGTHS,
    FROM_SERVER,
    cost_from,
    cost_of,
    full_cost,
)
from support.report_data import SETTINGS as MADE_SETTINGS
from vllm_kvpolicy.config import KVPolicyConfig

SETTINGS = MADE_SETTINGS | {
    "policy_config": {"wgkv_gates": "gates.safetensors", "quest_budget": 160},
    "variants": {"x": {"hard_mode": "dynamic"}},
}


def line(policy: str, **changes) -> dict:
    """Return an answer of 300 tokens to a prompt of 50, as far as its cost needs it."""
    place = {"policy": policy, "budget": 128, "interval": 64}
    return {**place, "prompt_tokens": 50, "output_tokens": 300, **changes}


def footprint(policy: str, prompt: int = 50, group: int = 4, **values):
    given = {"policy": policy, "budget": 128, "interval": 64, "spread_events": False}
    return KVPolicyConfig.from_dict(given | values).footprint(prompt, 32, group)


def test_windows_are_counted_where_the_model_is_known():
    plain = cost_of(line("keydiff"), SETTINGS)
    with_window = cost_of(line("snapkv"), SETTINGS)
    assert footprint("snapkv").window_blocks == 2
    assert with_window == (plain[0], plain[1] + 64)
    assert cost_of(line("snapkv"), SETTINGS | {"group_size": None}) == plain
    assert cost_of(line("snapkv"), SETTINGS | {"group_size": 8})[1] == plain[1] + 128


def test_what_the_server_says_wins():
    """Events at 100 and 164 have dropped 40 and 120.5 tokens per KV head."""
    said = line("wgkv", dropped=[[100, 40], [164, 120.5], [400, 300]])
    assert cost_from(said, SETTINGS) == FROM_SERVER
    read, peak = cost_of(said, SETTINGS)
    whole = full_cost(50, 300, 32)[0]
    # Fed at 100 to 163, and at 164 to 348.
    assert read == whole - 64 * 40 - 185 * 120.5
    # A block of 32 is free where 40 tokens are dropped, three of them after 120.5.
    assert peak == 32 * max(4, 6 - 1, 11 - 3)
    assert cost_of(said, SETTINGS, 60) == (full_cost(50, 60, 32)[0] - 9 * 40, 128)
    assert cost_of(line("wgkv", dropped=[]), SETTINGS)[0] == whole


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        ("full", FROM_LENGTHS),
        ("snapkv", FROM_LENGTHS),
        ("quest", FROM_LENGTHS),
        ("snapkv+quest", FROM_LENGTHS),
        ("hard-snapkv", FROM_LENGTHS),
        ("hard-snapkv:x", None),
        ("trim-keydiff", None),
        ("wgkv", None),
        ("wgkv+snapkv", None),
    ],
)
def test_what_a_cost_follows_from(policy, found):
    assert cost_from(line(policy), SETTINGS) == found
    assert (cost_of(line(policy), SETTINGS) is None) is (found is None)
    if policy != "full":
        assert cost_from(line(policy, dropped=[]), SETTINGS) == FROM_SERVER


def quest_reads(prompt: int, output: int, budget: int, events: list[int]) -> int:
    """Return what steps read: local tokens, and pages while they fit the budget."""
    read, frontier = 0, 0
    for position in range(prompt, prompt + output - 1):
        if position in events:
            frontier = (position - 32) // 32 * 32
        local = position + 1 - frontier
        pages = 0
        while local + 32 * pages < budget and 32 * pages < frontier:
            pages += 1
        read += local + 32 * pages
    return read


def test_quest_reads_pages_and_holds_everything():
    """Its first event is when a page has left the window: at 4 + 32 + 32 + 64."""
    plan = footprint("quest").events
    events = [132, 196, 260, 324]
    assert [plan.next_event(0), plan.next_event(133)] == events[:2]
    expected = quest_reads(50, 300, 160, events)
    assert cost_of(line("quest"), SETTINGS) == (expected, full_cost(50, 300, 32)[1])
    large = SETTINGS | {"policy_config": {"quest_budget": 4000}}
    assert cost_of(line("quest"), large) == full_cost(50, 300, 32)
    small = SETTINGS | {"policy_config": {"quest_budget": 1}}
    assert cost_of(line("quest"), small)[0] == quest_reads(50, 300, 1, events)
