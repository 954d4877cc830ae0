"""No kernel is compiled after the warm-up: events of any length find theirs made."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from support.launch_keys import Variant, recorded
from support.worker.launch_world import Shape, launch_world
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.events import LAST_PHASE
from vllm_kvpolicy.kernels.dispatch import forced
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker import pages
from vllm_kvpolicy.worker.compaction import Compactor
from vllm_kvpolicy.worker.transfer import HostCopy
from vllm_kvpolicy.worker.warmup import DummyEvents

LLAMA = Shape(layers=32, heads=8, group=4)
SMALL = Shape(layers=3, heads=1, group=3, dim=64)  # few of its numbers are even
VALUES = {"budget": 1024, "interval": 128}
EQUAL = ("snapkv", "ams-tova", "ams-keydiff", "h2o", "rkv", "lagkv", "streaming")
RAGGED = ("adakv-snapkv", "hard-snapkv", "pyramid-keydiff", "strat-tova", "ams-tova")
LENGTHS, AT_ONCE = 200, (1, 1, 1, 2, 3, 5, 8)


@pytest.fixture(autouse=True)
def without_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor has a shape alone, and every operation is Triton's."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: host)
    monkeypatch.setattr(pages, "_one_allocation", lambda caches: None)
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
