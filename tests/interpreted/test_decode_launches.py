"""What the plugin may add to a decode step in launches; more is a step back."""

import pytest

from support.worker.decode_launches import count_launches, names

# Operators, Triton kernels and copies to the device: of a step, and of each layer.
LIMITS = {"dms": (46, 5), "quest": (16, 2), "query windows": (6, 1)}


@pytest.mark.parametrize("name", LIMITS)
def test_a_decode_step_launches_no_more(name: str) -> None:
    step, layer = count_launches(name)
    print(f"\n{name}, once in a step: {step.total()}", *names(step), sep="\n")
    print(f"{name}, in each layer: {layer.total()}", *names(layer), sep="\n")
    assert step.total() <= LIMITS[name][0] and layer.total() <= LIMITS[name][1]
