"""What an event waits for: nothing where heads hold equally many tokens.

The worker's side of an event on fake tensors, which have no data to wait for; policies
have a test of their own. With heads of own lengths the waits are counted.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.kernel_checks import forced
from support.worker.event_world import REQUESTS, World
from vllm_kvpolicy.worker import pages

# Of signals and positions, of memory, of both kinds of keys and values.
EQUAL = ("epikv", "h2o", "ams-tova", "ams-keydiff", "rkv", "lagkv")
DYNAMIC = {"hard_mode": "dynamic"}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_heads_wait_for_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value read on the host raises, and so does a tensor left on the host."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: host)
    # Fake tensors have no addresses to compare.
    monkeypatch.setattr(pages, "_lie_together", lambda caches: True)
    with FakeTensorMode(), NumbersByIndex() as numbers:
        world = World(name, "meta")
        for ordinal in range(3):
            world.step(ordinal)
        assert len(world.requests) == len(REQUESTS)
    assert numbers.count == 0


class NumbersByIndex(TorchDispatchMode):
    """Counts `x[index] = 0`, for which a GPU makes the host wait.

    PyTorch makes the number a tensor on the host and copies it; `index_fill_` does not.
    A mask as an index is a `masked_fill_`, which does not wait either.
    """

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__.rstrip("_") == "index_put":
            into, indices, value = args[:3]
            indices = [index for index in indices if index is not None]
            is_mask = any(index.dtype == torch.bool for index in indices)
            self.count += value.ndim == 0 < into.ndim and not is_mask
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_by_index_are_counted(device: str) -> None:
    with FakeTensorMode(), NumbersByIndex() as numbers:
        table = torch.zeros(4, 3, device=device)
        index = torch.zeros(2, dtype=torch.int64, device=device)
        table.index_fill_(0, index, 0)
        table[index] = torch.ones(2, 3, device=device)
        table[:, 0] = 1
        table[table > 0] = 1
        assert numbers.count == 0
        table[index] = 0
        table[:, index] = 1.0
        table.view(-1)[index[:, None] + index] = -1
        assert numbers.count == 3


class Waits(TorchDispatchMode):
    """Counts the operations that a device would have to finish for the host."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.count += name in ("nonzero", "_local_scalar_dense", "masked_select")
        if name == "index":  # a mask as an index is a nonzero
            indices = [index for index in args[1] if index is not None]
            self.count += any(index.dtype == torch.bool for index in indices)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "options", "per_batch"),
    [
        ("ams-tova", {}, 0),
        # The reference looks for what moves; its twins do not.
        ("adakv-snapkv", {}, 1),
        ("hard-snapkv", DYNAMIC, 1),
        ("trim-snapkv", {}, 1),
    ],
)
def test_own_lengths_wait_a_fixed_number_of_times(
    name: str, options: dict[str, Any], per_batch: int
) -> None:
    """By batch of events, whatever the layers and heads."""
    world = World(name, "cpu", **options)
    for ordinal in range(3):
        with forced("reference"), Waits() as waits, NumbersByIndex() as numbers:
            world.step(ordinal)
        assert waits.count == per_batch
        assert numbers.count == 0
