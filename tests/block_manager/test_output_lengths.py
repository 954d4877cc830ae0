"""How long answers are expected to be, against answers drawn at random."""

import random

from vllm_kvpolicy.block_manager.output_lengths import (
    ENOUGH,
    LOOKAHEAD,
    REMEMBERED,
    OutputLengths,
)


def learned(lengths: list[int], most: int) -> OutputLengths:
    """Return what is learned from answers that are cut off at `most` tokens."""
    estimate = OutputLengths()
    for length in lengths:
        estimate.add(min(length, most), stopped=length < most)
    return estimate


def test_while_few_answers_are_known_only_the_next_tokens_are_foreseen():
    for estimate in (OutputLengths(), learned([10] * (ENOUGH - 1), 4096)):
        assert estimate.expected(0, 4096) == LOOKAHEAD
        assert estimate.expected(700, 4096) == 700 + LOOKAHEAD
        assert estimate.expected(700, 720) == 720
    assert learned([10] * ENOUGH, 4096).expected(0, 4096) == 10


def test_an_answer_without_tokens_says_nothing():
    estimate = learned([300] * REMEMBERED, 4096)
    for _ in range(REMEMBERED):
        estimate.add(0, stopped=True)
    assert estimate.expected(0, 4096) == 300


def test_answers_that_go_on_count_as_cut_off():
    estimate = learned([100] * 128, 8000)
    assert estimate.expected(0, 8000) == 100
    estimate = learned([100] * 128, 8000)
    estimate.unfinished = lambda: [150] * 128
    assert estimate.expected(0, 8000) == 8000


def test_answers_cut_off_at_a_length_were_there_when_others_stopped_at_it():
    estimate = OutputLengths()
    for number in range(200):
        estimate.add(300, stopped=number % 2 == 0)
    assert estimate.expected(0, 4096) == 4096


def test_answers_that_are_all_cut_off_say_nothing():
    assert learned([4096] * 500, 4096).expected(0, 4096) == 4096
    assert learned([4096] * 500, 4096).expected(0, 20000) == 20000


def test_nine_in_ten_answers_are_no_longer():
    rng = random.Random(3)
    lengths = [rng.randint(100, 1099) for _ in range(REMEMBERED)]
    estimate = learned(lengths, 4096)
    expected = estimate.expected(0, 4096)
    outlive = sum(length > expected for length in lengths) / len(lengths)
    assert 0.05 < outlive <= 0.1
    # Cut off at 600, the shares up to there are the same: nobody guesses beyond.
    assert learned(lengths, 600).expected(0, 4096) == 4096
    assert learned(lengths, 600).expected(0, 500) == 500


def test_an_answer_that_goes_on_is_expected_to_be_longer():
    rng = random.Random(4)
    estimate = learned([rng.randint(100, 1099) for _ in range(REMEMBERED)], 4096)
    previous = 0
    for generated in (0, 300, 600, 900):
        expected = estimate.expected(generated, 4096)
        assert expected > max(generated, previous)
        previous = expected
    assert estimate.expected(1200, 4096) == 4096, "longer than any other"
    assert estimate.expected(4096, 4096) == 4096


def test_old_answers_are_forgotten():
    estimate = learned([50] * REMEMBERED, 4096)
    assert estimate.expected(0, 4096) == 50
    for _ in range(REMEMBERED):
        estimate.add(2000, stopped=True)
    assert estimate.expected(0, 4096) == 2000
