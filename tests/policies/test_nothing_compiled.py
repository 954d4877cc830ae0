"""Policies on a CPU let oneDNN compile nothing: it would keep that for every length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.event_inputs import SHORTEST, make_inputs
from support.scorer_cases import VARIANTS, case_id
from support.sweeps import covering
from vllm_kvpolicy import compat
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies.base import Policy

USED = "onednn_verbose"


def loud() -> Any:
    """Let oneDNN say what it runs."""
    return torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON)


def gelu() -> Tensor:
    return F.gelu(torch.ones(3, 5))


def product() -> Tensor:
    rows = torch.ones(64, 64, dtype=torch.bfloat16)
    return rows @ rows


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize(
    ("use", "is_of_onednn"),
    [(gelu, True), (product, compat.multiplies_bfloat16())],  # some CPUs emulate it
    ids=["gelu", "product"],
)
def test_use_shows(
    use: Callable[[], Tensor], is_of_onednn: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with loud():
        use()
    assert (USED in capfd.readouterr().out) == is_of_onednn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in covering(registry.names())), *VARIANTS],
    ids=case_id,
)
def test_decide(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    build: Callable[..., Policy],
    capfd: pytest.CaptureFixture[str],
) -> None:
    policy = build(name, options)
    inputs = make_inputs(policy.needs, dtype=dtype)
    with loud():
        policy.decide(inputs, SHORTEST)
    assert USED not in capfd.readouterr().out
