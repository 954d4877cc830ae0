"""Which of its tokens a request says to keep or to drop first."""

import re

import pytest
import torch

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.hints import Hints, read_hints
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.hints import always_kept, hint_numbers, hinted

N = 32


def server(**values):
    given = {"policy": "tova", "budget": 100, "policy_config": {"hints": True}}
    return KVPolicyConfig.from_dict({**given, **values})


def event(hints: Hints, position: int, pinned: int = 0, sinks: int = 4) -> CompactEvent:
    frontier = (position - 8) // N
    held = (tuple(range(pinned, frontier)), (), ())
    counts = (0, position, frontier, 64, sinks, position, 0)
    return CompactEvent(
        "r", 0, "tova", *counts, *held, pinned_blocks=(0,) * pinned, hints=hints
    )


def test_ranges_are_sorted_and_those_that_touch_are_one():
    found = read_hints(
        {"kv_keep": [50, 60, 10, 20, 55, 70, 20, 21], "kv_drop_first": [21, 50]}
    )
    assert found == Hints(keep=((10, 21), (50, 70)), drop_first=((21, 50),))
    assert found.num_kept(15, 60) == 6 + 10
    assert not read_hints({"kv_keep": []})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kv_keep": "10-20"}, "kv_keep: got '10-20', expected a list of first, end"),
        ({"kv_keep": [1, 2, 3]}, "expected a list of first, end"),
        (
            {"kv_keep": [2, 2]},
            "got [2, 2], expected integers 0 <= first < end",
        ),
        ({"kv_keep": [-1, 2]}, "got [-1, 2]"),
        ({"kv_keep": [1, 2.5]}, "got [1, 2.5]"),
        ({"kv_keep": [False, 2]}, "got [False, 2]"),
        ({"kv_drop_first": [n * 2 for n in range(520)]}, "of up to 256 ranges"),
        (
            {"kv_keep": [10, 20], "kv_drop_first": [5, 11]},
            "kv_drop_first: got [5, 11], expected no token of kv_keep, got 10 in both",
        ),
        (
            {"kv_keep_messages": [0]},
            "kv_keep_messages: got [0], expected kv_keep with tokens: only chats",
        ),
    ],
)
def test_bad_hints_name_key_value_and_what_is_valid(asked, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        server().with_request(asked)


@pytest.mark.parametrize(
    ("values", "policy", "words"),
    [
        ({"policy_config": {}}, "tova", "a server with `hints` true"),
        ({"policy": "identity", "events": "always"}, "identity", "which drops nothing"),
        (
            {"policy_config": {"hints": True, "allow": ["dms"], "exact": True}},
            "dms",
            "it",
        ),
    ],
)
def test_hints_that_could_not_be_followed_are_refused(values, policy, words):
    with pytest.raises(ValueError, match=r"kv_keep: got \[1, 2\], expected .*" + words):
        server(**values).with_request({"kv_policy": policy, "kv_keep": [1, 2]})


def test_what_the_budget_has_no_room_for_is_said():
    """Room for 100 - 4 sinks - 32 recent - a page; what is pinned stays anyway."""
    asked = {"kv_keep": [10, 20, 60, 100, 200, 210], "kv_pin": 70}
    request = server().with_request(asked, N)
    found = request.hints_of(300, N)
    kept, missed = ((10, 20), (60, 100), (200, 202)), ((202, 210),)
    assert found == Hints(kept, missed=missed)
    assert found.said(300)["missed"] == [202, 210]
    said = {"keep": [10, 20, 60, 90], "drop_first": [], "missed": [90, 100, 202, 210]}
    assert Hints(kept[:2], missed=missed).said(90) == said
    part = request.hinted.fitted(70, 12)
    assert part == Hints(((10, 20), (60, 82)), missed=((82, 100), (200, 210)))
    assert request.hinted.fitted(0, 0) == Hints(
        missed=((10, 20), (60, 100), (200, 210))
    )


def test_what_is_pinned_does_not_go_first():
    """Nor do sinks; ranges behind the last token wait for tokens that never come."""
    request = server().with_request(
        {"kv_drop_first": [2, 90, 400, 500], "kv_pin": 70}, N
    )
    found = request.hints_of(300, N)
    assert found == Hints(drop_first=((70, 90), (400, 500)), missed=((2, 70),))
    said = {"keep": [], "drop_first": [70, 90], "missed": [2, 70, 400, 500]}
    assert found.said(320) == said
    sinks = server().with_request({"kv_drop_first": [2, 90]}, N).hints_of(300, N)
    assert sinks == Hints(drop_first=((4, 90),), missed=((2, 4),))


def test_an_answer_may_name_more_ranges_than_a_request():
    """All that both kinds may have, behind the last token of a short answer."""
    starts = range(100, 100 + 8 * 256, 8)
    keep, drop = ([n for s in starts for n in (s + k, s + k + 2)] for k in (0, 4))
    request = server().with_request({"kv_keep": keep, "kv_drop_first": drop}, N)
    said = request.hints_of(40, N).said(60)
    assert said == {"keep": [], "drop_first": [], "missed": sorted(keep + drop)}


def test_marks_lie_on_true_positions():
    """Of two events that keep different tokens, one without hints; padding has none."""
    hints = Hints(keep=((2, 4), (6, 7)), drop_first=((4, 6), (50, 90)))
    events = [event(hints, 60), event(Hints(), 70)]
    numbers = {k: torch.as_tensor(v) for k, v in hint_numbers(events).items()}
    positions = torch.tensor([[[0, 2, 3, 4, 6, 7, 50, 3]], [[2, 3, 4, 5, 6, 7, 8, 9]]])
    lengths = torch.tensor([[7], [8]])
    stays, others = hinted(numbers, positions, lengths, events)
    assert stays[0, 0].tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    assert others[0, 0].tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert not stays[1].any() and others[1].all()
    assert hint_numbers(events[1:]) == {}


def test_pages_have_room_for_what_stays_below_the_frontier():
    """Sinks and ranges behind the pinned tokens, once each; here up to token 64."""
    hints = Hints(keep=((0, 40), (60, 80)))
    assert always_kept(event(hints, 100), N) == 4 + 36 + 4
    assert always_kept(event(hints, 100, pinned=1, sinks=2), N) == 2 + 6 + 4
