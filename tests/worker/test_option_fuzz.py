"""Any options that a start accepts carry a request through its events.

`KVPOLICY_FUZZ=2000` draws as many configurations; few by default.
"""

import os
from typing import Any, Literal, get_args, get_origin

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from support.option_limits import limits_of
from support.sweeps import trials
from support.worker.event_world import REQUESTS, World
from vllm_kvpolicy.policies.names import names, parse
from vllm_kvpolicy.policies.options import kind_of

EXAMPLES = int(os.environ.get("KVPOLICY_FUZZ", trials(150)))
# Of admissions, files are read and decisions seen by captures that the world lacks.
NAMES = [
    name
    for name in names()
    if not any(word.decides for word in parse(name).parts)
    and not any(part.fitted for part in parse(name).parts)
]
# What the world lends; a start checks these keys against the budget.
WINDOW = 32
WINDOWS = ("window", "expected_window", "stat_window")


def values(key: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    """Return what a field's schema accepts, and some that only other fields refuse."""
    kind = kind_of(field)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    low, high = limits_of(field)
    high = min(high, WINDOW) if key in WINDOWS else high
    if kind is int:
        near = st.integers(low, min(high, low + 300))
        return st.sampled_from([low, high]) | near | st.integers(low, high)
    return st.sampled_from([low, high]) | st.floats(low, high)


@st.composite
def configurations(draw: Any) -> tuple[str, dict[str, Any]]:
    """Draw a policy and some of its options, files and what they tell apart."""
    name = draw(st.sampled_from(NAMES))
    fields = {
        key: values(key, field)
        for key, field in parse(name).options.items()
        if kind_of(field) is not str and not field.is_required()
    }
    windows = {key: fields.pop(key) for key in WINDOWS if key in fields}
    return name, draw(st.fixed_dictionaries(windows, optional=fields))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(configurations())
def test_what_a_start_accepts_runs(configuration: tuple[str, dict[str, Any]]) -> None:
    name, options = configuration
    torch.manual_seed(0)
    world, refusal = None, ""
    try:
        world = World(name, "cpu", torch.rand, **options)
    except ValueError as error:
        refusal = str(error)
    assert (world is None) == ("expected" in refusal) and "\n" not in refusal
    assume(world is not None)
    assume(world.policy.needs.window_tokens <= WINDOW)  # presets bring their own
    for ordinal in range(4):
        world.step(ordinal)
    assert len(world.requests) == len(REQUESTS)
