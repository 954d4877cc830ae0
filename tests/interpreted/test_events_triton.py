"""Whole events with every operation in Triton, against the references."""

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced
from support.sweeps import some
from support.worker.chain_engine import Chain, Setup
from support.worker.chain_policy import ScriptedPolicy
from support.worker.event_world import DIM, HEADS, World
from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.kernels.paged_reductions import paged_cosines, paged_norms
from vllm_kvpolicy.kernels.segment_quota import segment_quota
from vllm_kvpolicy.kernels.window_usage import window_usage

POLICIES = ("ams-keydiff", "ams-snapkv", "streaming", "knorm", "rkv")


def run(name: str, which: str) -> World:
    """Run two steps with two events each on random keys, values and queries."""
    generator = torch.Generator().manual_seed(5)
    with forced(which):
        world = World(name, "cpu", partial(torch.randn, generator=generator))
        for ordinal in range(2):
            world.step(ordinal)
    return world


@pytest.mark.parametrize("name", some(POLICIES))
def test_events_leave_the_same_cache(name: str) -> None:
    by_key = (paged_norms, paged_cosines)
    operations = (window_usage, segment_quota, compact_pages, *by_key)
    before = [operation.calls["triton"] for operation in operations]
    want, got = run(name, "reference"), run(name, "triton")
    ran = [op.calls["triton"] > n for op, n in zip(operations, before, strict=True)]
    needs_usage = "tova" in name or "snap" in name or "ams" in name
    by_key_too = name == "knorm", "keydiff" in name
    assert ran == [needs_usage, "ams" in name, True, *by_key_too]
    # The null block's first vector takes in queries that nobody wants.
    places = (world.caches.view(len(world.caches), -1, DIM) for world in (got, want))
    mine, other = (vectors[:, HEADS:] for vectors in places)
    assert torch.equal(mine, other)
    for mine, other in zip(got.tables, want.tables, strict=True):
        assert torch.equal(mine, other)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}
    found, expected = got.compactor.memory, want.compactor.memory
    torch.testing.assert_close(found.survivors, expected.survivors, **close)
    torch.testing.assert_close(found.local, expected.local, **close)


@pytest.mark.parametrize("is_ragged", [False, True], ids=["equal", "ragged"])
def test_every_head_holds_its_own_tokens_in_triton(is_ragged: bool) -> None:
    """Requests come, go and are preempted; every token is checked after every step."""
    before = compact_pages.calls["triton"]
    policy = ScriptedPolicy(is_ragged, False)
    totals = Chain(Setup(policy, is_ragged=is_ragged)).run(18)
    assert totals["events"] > 5
    most = 3  # events of a step, and so of a batch
    assert most * (compact_pages.calls["triton"] - before) >= totals["events"]
