"""Event positions and footprints against hand-written cases and a token-by-token walk.

Owns the proof that the closed forms of events say what the design says.
"""

import random
from collections import Counter
from dataclasses import replace
from itertools import repeat

import numpy as np
import pytest

from support.event_oracle import Case, walk_events, walk_peak
from support.sweeps import trials
from vllm_kvpolicy.events import LAST_PHASE, EventPlan, Footprint, request_phase

# name, prompt length, K, I, prefill interval, first event positions.
# Only events at which the rule of the design says "held" are listed, by hand:
# (i) multiples of the prefill interval inside the prompt with more than K held,
# (ii) the prompt's end with at least K + I held, (iii) then K + I held, then every I.
TABLE = [
    ("prompt of one token", 1, 10, 5, 4096, [15, 20, 25]),
    ("prompt shorter than the budget", 10, 100, 50, 4096, [150, 200, 250]),
    ("prompt one above the budget", 101, 100, 50, 4096, [150, 200, 250]),
    ("prompt of K + I", 150, 100, 50, 4096, [150, 200, 250]),
    ("prompt of K + I + 1", 151, 100, 50, 4096, [151, 201, 251]),
    ("events inside the prompt", 1000, 100, 50, 256, [256, 512, 768, 1000, 1050]),
    ("prompt a multiple of the grid", 768, 100, 50, 256, [256, 512, 768, 818]),
    ("the same, interval one above", 768, 100, 257, 256, [256, 512, 769, 1026]),
    ("prompt ends one after an event", 513, 100, 50, 256, [256, 512, 562, 612]),
    ("prompt ends I after an event", 562, 100, 50, 256, [256, 512, 562, 612]),
    ("prompt ends I + 1 after an event", 563, 100, 50, 256, [256, 512, 563, 613]),
    ("budget above the grid", 1000, 300, 50, 256, [512, 768, 1000, 1050]),
    ("budget equal to the grid", 1000, 256, 50, 256, [512, 768, 1000, 1050]),
    ("budget one above the grid", 1000, 257, 50, 256, [512, 768, 1000, 1050]),
    ("fine grid, prompt below the budget", 200, 300, 50, 64, [350, 400, 450]),
    ("fine grid, end not due", 400, 300, 50, 64, [320, 384, 434, 484]),
    ("fine grid, end just not due", 400, 300, 17, 64, [320, 384, 401, 418]),
    ("exactly K on the grid, end due", 320, 256, 64, 256, [320, 384, 448]),
    ("interval 1, short prompt", 10, 20, 1, 4096, [21, 22, 23, 24]),
    ("interval 1, end after an event", 33, 20, 1, 16, [32, 33, 34, 35]),
    ("grid of one token", 15, 10, 5, 1, [11, 12, 13, 14, 19, 24]),
    ("interval above the budget", 5, 10, 100, 4096, [110, 210, 310]),
    ("interval above grid and budget", 100, 10, 100, 32, [32, 64, 96, 196, 296]),
    ("interval not a multiple of a block", 50, 64, 33, 4096, [97, 130, 163]),
    ("defaults, prompt one above the grid", 4097, 2048, 512, 4096, [4096, 4608, 5120]),
    ("defaults, two events inside", 10000, 2048, 512, 4096, [4096, 8192, 10000, 10512]),
    ("budget that never binds in 4096", 3000, 4096, 512, 4096, [4608, 5120, 5632]),
]


@pytest.mark.parametrize(
    "prompt_len, budget, interval, grid, expected",
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_event_positions_by_hand(prompt_len, budget, interval, grid, expected):
    plan = EventPlan(prompt_len, budget, interval, grid)
    assert plan.positions_up_to(expected[-1] + 1) == expected
    case = Case(prompt_len, budget, interval, grid)
    assert walk_events(case, expected[-1]) == expected


def random_case(rng: random.Random, longest: int) -> Case:
    """Draw a request that the configuration would accept, small numbers more often."""
    block_size = rng.choice((4, 8, 16, 32))
    recent = rng.choice((0, rng.randrange(3 * block_size)))
    least = recent + block_size
    case = Case(
        prompt_len=rng.randint(1, longest),
        budget=least + rng.choice((0, 1, rng.randrange(longest), 3 * block_size)),
        interval=rng.choice((1, 2, block_size, rng.randint(1, longest))),
        prefill_interval=block_size * rng.choice((1, 2, 3, rng.randint(1, 20))),
        recent=recent,
        block_size=block_size,
    )
    return in_some_phase(case, rng)


def in_some_phase(case: Case, rng: random.Random) -> Case:
    """Draw a phase, often one of the ends, and a window that fits in an interval."""
    window = rng.choice((0, 1, case.interval, rng.randint(0, case.interval)))
    phase = rng.choice((0, 1, LAST_PHASE, rng.randrange(2**32), rng.randrange(2**32)))
    return replace(case, phase=phase, window=window)


def plan_of(case: Case) -> EventPlan:
    return EventPlan(
        case.prompt_len,
        case.budget,
        case.interval,
        case.prefill_interval,
        case.phase,
        case.window,
    )


def test_closed_form_equals_a_walk_over_tokens():
    rng = random.Random(1)
    num_events = 0
    for number in range(trials(4000)):
        case = random_case(rng, 300)
        if number % 4 == 0:  # a grid that is a multiple of nothing
            numbers = [rng.randint(1, 60) for _ in range(4)]
            case = in_some_phase(Case(*numbers), rng)
        last = rng.randrange(700)
        expected = walk_events(case, last)
        assert plan_of(case).positions_up_to(last + 1) == expected, case
        num_events += len(expected)
    assert num_events > 40_000


def test_next_event_equals_the_generator():
    rng = random.Random(3)
    for _ in range(trials(300)):
        case = random_case(rng, 200)
        plan = plan_of(case)
        expected = iter(walk_events(case, 2000))
        following = next(expected, None)
        for position in range(500):
            if following is not None and position > following:
                following = next(expected, None)
            found = plan.next_event(position)
            assert found == following or (following is None and found > 2000), (
                case,
                position,
            )


def random_lent(rng: random.Random, case: Case) -> int:
    """Draw the superblocks of a request's query window; none without a window."""
    return -(-case.window * rng.randint(1, 8) // (2 * case.block_size))


def footprint_of(case: Case, lent: int = 0, keeps_all: bool = False) -> Footprint:
    return Footprint(plan_of(case), case.recent, case.block_size, keeps_all, lent)


@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("has_window", [False, True])
def test_peak_blocks_is_exact_for_single_tokens_and_random_chunks(
    keeps_all, has_window
):
    rng = random.Random(5)
    binding = in_window = 0
    for _ in range(trials(1500)):
        case = random_case(rng, 250)
        num_tokens = rng.randint(1, 600)
        lent = random_lent(rng, case) if has_window else 0
        expected = footprint_of(case, lent, keeps_all).peak_blocks(num_tokens)
        singles = walk_peak(case, num_tokens, repeat(1), keeps_all, lent)
        sizes = (rng.choice((1, 7, 64, 500)) for _ in repeat(None))
        chunked = walk_peak(case, num_tokens, sizes, keeps_all, lent)
        assert (singles, chunked) == (expected, expected), (case, lent, num_tokens)
        binding += expected < -(-num_tokens // case.block_size)
        without = footprint_of(case, keeps_all=keeps_all).peak_blocks(num_tokens)
        assert without <= expected <= without + lent
        in_window += without < expected
    assert (binding == 0) if keeps_all else (binding > trials(400))
    assert in_window > trials(500) if has_window else not in_window


def test_a_window_counts_from_its_first_query_to_the_event():
    # As in `Footprint`: the event at 100 finds 7 superblocks and leaves 3 + 2.
    footprint = Footprint(EventPlan(100, 64, 32, 4096, 0, 10), 8, 16, False, 3)
    assert [footprint.peak_blocks(end) for end in (80, 90, 91, 100)] == [5, 6, 9, 10]
    # The next one opens at 122 and is open at 132, with 3 + 4 superblocks.
    assert footprint.peak_blocks(500) == 10
    late = Footprint(EventPlan(1, 64, 32, 4096, 0, 32), 8, 16, False, 3)
    assert late.peak_blocks(64) == 4, "the event at 96 reads from 64 on"
    assert late.peak_blocks(65) == 5 + 3


def test_peak_blocks_counts_a_shared_prefix_until_the_event():
    # The event at 100 finds 7 superblocks, 4 of them shared, and the window.
    footprint = Footprint(EventPlan(100, 64, 32, 4096, 0, 10), 8, 16, False, 3)
    assert footprint.peak_blocks(100, num_shared=4) == 6
    assert footprint.peak_blocks(500, num_shared=4) == 3 + 4 + 3


def test_drafts_have_superblocks_up_to_the_longest_request_and_no_further():
    """Of 16 tokens: 3 drafts behind 30 take a third one, behind 47 of 48 no fourth."""
    plan = EventPlan(100, 64, 32, 4096, 0, 10)
    footprint = Footprint(plan, 8, 16, ahead=3, longest=48)
    assert [footprint.blocks(n) for n in (29, 30, 45, 46, 47, 48)] == [2, 3, 3, 3, 3, 3]
    assert footprint.blocks(np.array([29, 46, 48])).tolist() == [2, 3, 3]


def test_an_event_holds_the_budget_and_less_than_a_page_more():
    rng = random.Random(7)
    for _ in range(trials(1000)):
        case = random_case(rng, 300)
        footprint = Footprint(plan_of(case), case.recent, case.block_size)
        for position in walk_events(case, 700):
            local = position - footprint.frontier_blocks(position) * case.block_size
            held = footprint.global_blocks(position) * case.block_size + local
            assert case.recent <= local < case.recent + case.block_size
            assert case.budget <= held < case.budget + case.block_size, (case, position)


def bound_of(case: Case, longest: int, lent: int) -> int:
    """The bound of a server with the numbers of a case."""
    return footprint_of(case, lent).worst_blocks(longest)


# The bound takes the worst alignment of local tokens to blocks after an event that
# does not end on whole blocks, which a given interval need not reach.
WORST_CASE_SLACK_BLOCKS = 1


def test_worst_case_bounds_every_prompt_length_and_is_tight():
    rng = random.Random(8)
    slacks = []
    for number in range(trials(150)):
        longest = rng.randint(40, 500)
        case = random_case(rng, longest)
        lent = number % 3
        bound = bound_of(case, longest, lent)
        peak = 0
        for prompt_len in range(1, longest + 1):
            asked = in_some_phase(replace(case, prompt_len=prompt_len), rng)
            peak = max(peak, footprint_of(asked, lent).peak_blocks(longest))
        assert peak <= bound, (case, lent, longest)
        assert bound <= -(-longest // case.block_size) + lent
        slacks.append(bound - peak)
    assert max(slacks) <= WORST_CASE_SLACK_BLOCKS
    assert slacks.count(0) > 0.8 * len(slacks)


def test_worst_case_of_the_server_bounds_requests_with_smaller_numbers():
    rng = random.Random(9)
    for number in range(trials(6000)):
        longest = rng.randint(40, 400)
        case = random_case(rng, longest)
        lent = number % 4
        bound = bound_of(case, longest, lent)
        recent = max(case.recent - rng.choice((0, 1, case.recent)), 0)
        less = rng.choice((0, 1, 2, rng.randint(0, case.budget)))
        budget = max(case.budget - less, recent + case.block_size)
        interval = max(case.interval - rng.choice((0, 1, 2, 50)), 1)
        prompt_len = rng.choice((case.prompt_len, budget + interval))
        asked = Case(prompt_len, budget, interval, case.prefill_interval)
        plan = plan_of(in_some_phase(asked, rng))
        footprint = Footprint(plan, recent, case.block_size, False, lent)
        most = footprint.most_blocks(longest)
        if longest <= case.budget:
            bound += lent  # the server's own requests have no event
        context = (case, lent, longest, budget, interval, recent)
        assert footprint.peak_blocks(longest) <= most <= bound, context


def test_the_bound_over_phases_is_right_and_tight():
    rng = random.Random(10)
    slacks = []
    for _ in range(trials(300)):
        case = replace(random_case(rng, 100), interval=rng.randint(1, 40), window=0)
        num_tokens = rng.randint(1, 300)
        # Phases of which at least one gives each of the shifts.
        steps = 2 * case.interval
        plans = [
            plan_of(replace(case, phase=step * 2**32 // steps)) for step in range(steps)
        ]
        footprints = [Footprint(p, case.recent, case.block_size) for p in plans]
        bounds = {footprint.most_blocks(num_tokens) for footprint in footprints}
        assert len(bounds) == 1
        peak = max(footprint.peak_blocks(num_tokens) for footprint in footprints)
        slacks.append(bounds.pop() - peak)
    assert set(slacks) <= {0, 1}, slacks
    assert slacks.count(0) > 0.9 * len(slacks)


def test_every_phase_has_its_position_and_all_are_as_likely():
    # 10 positions, 56 to 65, past a prompt that ended in an event at 53; W = 3.
    found = Counter(
        EventPlan(53, 30, 12, 4096, number << 22, 3).first_decode_event
        for number in range(2**10)
    )
    assert sorted(found) == list(range(56, 66))
    assert max(found.values()) - min(found.values()) <= 1


def test_the_phase_is_that_of_the_prompt_and_the_seed():
    prompt = list(range(100))
    assert request_phase(prompt) == request_phase(tuple(prompt))
    others = [[*prompt[:-1], 7], prompt[:-1], prompt[::-1], [*prompt, 0]]
    phases = {request_phase(each) for each in (prompt, *others)}
    phases |= {request_phase(prompt, seed) for seed in (0, 1, 2**64, -5)}
    assert len(phases) == 9
    assert all(0 <= phase <= LAST_PHASE for phase in phases)


@pytest.mark.parametrize(
    "longest, expected",
    [
        (4096, 256),  # one prompt may fill it before the first event
        (4097, 256),  # 126 + 2 blocks and one token more, 129, are less
        (6000, 256),  # 126 + 2 blocks and 1904 tokens, 247, are less
        (6200, 260),  # 126 + 2 blocks and 2104 tokens are more: 126 + 134
        (8192, 384),  # 126 + 2 blocks and 4096 tokens: 126 + 258
        (131072, 384),
    ],
)
def test_worst_case_by_hand_with_the_defaults(longest, expected):
    # An event at 4096 leaves 32 local tokens and 2048 - 32 = 126 * 16 survivors.
    footprint = Footprint(EventPlan(1, 2048, 512, 4096), 32, 16)
    assert footprint.worst_blocks(longest) == expected


def test_a_request_with_a_smaller_interval_may_need_a_block_more_at_its_worst():
    # 65 tokens, N = 32: the first event of K = 32, I = 30 is at 62 and leaves
    # 30 local tokens and one block of survivors; 92 tokens would straddle a third.
    assert Footprint(EventPlan(28, 32, 30, 32), 0, 32).peak_blocks(65) == 3
    assert Footprint(EventPlan(28, 32, 32, 32), 0, 32).worst_blocks(65) == 3
