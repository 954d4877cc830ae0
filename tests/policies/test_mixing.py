"""The hash: what it gives today it gives for ever, and it scatters."""

import torch

from vllm_kvpolicy.policies.scorers.random import mix


def lowbias32(value: int) -> int:
    """The published function on one 32-bit number."""
    value ^= value >> 16
    value = value * 0x7FEB352D % 2**32
    value ^= value >> 15
    value = value * 0x846CA68B % 2**32
    return value ^ value >> 16


def test_equals_the_published_function() -> None:
    values = [0, 1, 2, 12345, 2**31, 2**32 - 1]
    assert mix(torch.tensor(values)).tolist() == [lowbias32(v) for v in values]


def test_is_a_bijection_that_scatters() -> None:
    drawn = mix(torch.arange(2**16))
    assert len(drawn.unique()) == 2**16
    assert (drawn >= 0).all() and (drawn < 2**32).all()
    ones = torch.stack([(drawn >> bit) & 1 for bit in range(32)]).float().mean(-1)
    assert ((ones - 0.5).abs() < 0.02).all()


def test_high_and_negative_numbers_count() -> None:
    values = torch.tensor([5, 5 + 2**32, 5 + 2**40, -7, -(2**40)])
    assert len(mix(values).unique()) == 5
