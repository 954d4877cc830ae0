"""Builds any policy, with a random calibration file where it asks; golden data."""

from collections.abc import Callable
from typing import Any

import pytest

from support.calibration_files import options_for
from support.event_inputs import GROUP, HEADS, LAYERS, SIZE
from support.golden import Golden, read_golden
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.base import Policy


@pytest.fixture(scope="session")
def scorer_options(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict[str, Any]]:
    """Options without which a policy is not built, for events of `event_inputs`."""

    def options(name: str, num_layers: int = LAYERS) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("calibration")
        return options_for(name, folder, num_layers, HEADS, GROUP, SIZE)

    return options


@pytest.fixture(scope="session")
def build(scorer_options: Callable[..., dict[str, Any]]) -> Callable[..., Policy]:
    """`factory.build` that needs no options."""

    def build_policy(name: str, options: dict[str, Any] | None = None) -> Policy:
        return factory.build(name, {**scorer_options(name), **(options or {})})

    return build_policy


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    """The arrays of the file that a test file names as `GOLDEN`."""
    return read_golden(request.module.GOLDEN)
