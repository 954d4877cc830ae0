"""What one batch of events may cost in launches; more than that is a step back."""

from typing import Any

import pytest

from support.sweeps import some
from support.worker.event_launches import count_launches

# Operators, Triton kernels and copies to the device, of one batch of third events.
LIMITS: dict[str, tuple[dict[str, Any], int]] = {
    "ams-tova": ({}, 53),
    "snapkv": ({}, 27),
    "streaming": ({}, 23),
    "adakv-snapkv": ({}, 41),
    "hard-snapkv": ({"hard_mode": "dynamic"}, 79),
}


@pytest.mark.parametrize("name", some([*LIMITS]))
def test_a_batch_of_events_launches_no_more(name: str) -> None:
    options, limit = LIMITS[name]
    counts = count_launches(name, **options)
    print(f"\n{name}: {counts.total()}")
    for each, count in counts.most_common():
        print(f"{count:5} {each}")
    assert counts.total() <= limit, counts
