"""No kernel is compiled after the warm-up: events of any length find theirs made.

Nothing is launched: what Triton would compile a kernel for is recorded. It compiles one
for each combination of constants, dtypes, and what it finds out about the other
arguments: whether a number is one, is divisible by 16 or needs 64 bits, and whether an
address is divisible by 16.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import JITFunction, driver

from benchmarks.gpu.kernel_checks import forced
from support.compile_triton_kernels import NO_DEVICE
from support.worker.tiers import make_tier
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.events import LAST_PHASE
from vllm_kvpolicy.policies.compose import build
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker import pages
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.compaction import Compactor, remembered
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.transfer import HostCopy
from vllm_kvpolicy.worker.warmup import DummyEvents

META = torch.device("meta")
Variant = tuple[str, str]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, with `group` query heads per KV head, and of its server."""

    layers: int
    heads: int
    group: int
    dim: int = 128
    block_size: int = 16
    num_blocks: int = 40_000
    requests: int = 64
    max_model_len: int = 8192


LLAMA = Shape(layers=32, heads=8, group=4)
SMALL = Shape(layers=3, heads=1, group=3, dim=64)  # few of its numbers are even
VALUES = {"budget": 1024, "interval": 128}
EQUAL = ("snapkv", "ams-tova", "ams-keydiff", "h2o", "rkv", "lagkv", "streaming")
RAGGED = ("adakv-snapkv", "hard-snapkv", "pyramid-keydiff", "strat-tova", "ams-tova")
LENGTHS, AT_ONCE = 80, (1, 1, 1, 2, 3, 5, 8)


def launch_world(config: KVPolicyConfig, shape: Shape) -> Compactor:
    """Return the part of a worker that carries out events, on tensors without data.

    Args:
        config: of policies that need neither signals nor the rotary embedding.
        shape: of model and server.
    """
    size = shape.layers, shape.num_blocks, shape.heads, shape.block_size
    caches = torch.zeros(*size, 2 * shape.dim, dtype=torch.bfloat16, device=META)
    pool = PagePool(list(caches), False)
    policies = {
        name: build(name, config.resolved(name).options) for name in config.policies
    }
    longest = -(-config.budget_tokens // shape.block_size)
    requests = RequestTable(shape.requests, longest, shape.block_size, META)
    windows = QueryWindows(shape.group, 8192, META)
    windows.bind(pool)
    local = config.recent_tokens + shape.block_size - 1
    sizes = shape.num_blocks, shape.layers * shape.heads, local
    names = {each for policy in policies.values() for each in remembered(policy.needs)}
    return Compactor(
        policies=policies,
        pool=pool,
        tier=make_tier(config.is_ragged, requests, pool, 64, 512),
        requests=requests,
        captures=[windows],
        memory=SurvivorMemory(sorted(names), requests, *sizes),
        rope=None,
        scale=0.1,
    )


@dataclass(frozen=True)
class Address:
    """Stands for a tensor without data: its memory begins at an even address."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        """Return the bytes before its first number."""
        return self.offset

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return an address in place of a tensor."""
        if not isinstance(value, torch.Tensor):
            return value
        return cls(value.dtype, value.storage_offset() * value.element_size())


@contextmanager
def recorded() -> Iterator[set[Variant]]:
    """Launch nothing, and yield (kernel, its variant) of what would have run."""
    found: set[Variant] = set()

    def record(
        kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        _, _, _, _, bind = kernel.device_caches[0]
        named = {key: Address.of(value) for key, value in options.items()}
        _, special, rest = bind(*map(Address.of, args), **named)
        found.add((kernel.__name__, f"{special} {sorted(rest.items())}"))

    run, active = JITFunction.run, driver._active
    driver.set_active(NO_DEVICE)
    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = run
        driver.set_active(active)


@pytest.fixture(autouse=True)
def without_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor has a shape alone, and every operation is Triton's."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: host)
    monkeypatch.setattr(pages, "_lie_together", lambda caches: True)
    # How long lists are is read from the device, which here has nothing to say.
    rng, most = Random(0), VALUES["budget"] // LLAMA.block_size
    pages_of = lambda copy: np.full((2, 99), rng.randint(most, 3 * most))  # noqa: E731
    monkeypatch.setattr(HostCopy, "read", pages_of)
    with forced("triton"):
        yield


def variants(
    worker: Compactor, steps: Iterator[Sequence[CompactEvent]]
) -> set[Variant]:
    """Return what the events of steps would have compiled."""
    with recorded() as found:
        for events in steps:
            worker.run(events)
    return found


def dummy_events(config: KVPolicyConfig, shape: Shape) -> DummyEvents:
    sizes = shape.requests, shape.block_size, shape.num_blocks, shape.max_model_len
    return DummyEvents(config, *sizes, shape.group)


def of_random_prompts(
    config: KVPolicyConfig, shape: Shape, seed: int
) -> Iterator[list[CompactEvent]]:
    """Yield steps in which several requests of a random prompt length have an event."""
    rng, dummy = Random(seed), dummy_events(config, shape)
    for _ in range(LENGTHS):
        prompt = rng.randint(1, shape.max_model_len - 2)
        phase = rng.randint(0, LAST_PHASE)
        count, policy = rng.choice(AT_ONCE), rng.choice(config.policies)
        for event in dummy.first(policy, prompt, phase):
            yield [replace(event, request_id=f"r{number}") for number in range(count)]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(LLAMA, id="llama", marks=pytest.mark.slow),
        pytest.param(SMALL, id="small"),
    ],
)
@pytest.mark.parametrize("names", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_events_of_any_length_compile_nothing(
    names: Sequence[str], shape: Shape
) -> None:
    plain = {**VALUES, "policy": names[0], "allow": list(names[1:])}
    config = KVPolicyConfig.from_dict(plain)
    worker = launch_world(config, shape)
    warm = variants(worker, dummy_events(config, shape).steps())
    worker.requests.drop(list(worker.requests.row_of))
    cold = variants(worker, of_random_prompts(config, shape, 1)) - warm
    assert len(warm) > 10
    assert not cold, "\n".join(map(str, sorted(cold)))
