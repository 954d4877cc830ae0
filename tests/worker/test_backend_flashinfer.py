"""FlashInfer with a policy: vLLM's builder and forward pass, stand-in kernels."""

import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.attention.oracles import judge
from support.attention.scene import Request, Scene, Shape, requests
from support.engine_configs import engine_args
from support.worker.flashinfer_stand_in import VLLM_MODULE, Wrapper, install

SHAPE = Shape(heads=2, group=2, dim=64, block=16, dtype=torch.float32)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = install(monkeypatch)
    monkeypatch.setattr(found.get_impl_cls(), "do_kv_cache_update", write)
    return found


@pytest.fixture
def config(tiny_model: Path) -> Any:
    config = engine_args(tiny_model).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def write(self: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """Stand in for vLLM's CUDA kernel that writes the cache."""
    both = torch.cat([key, value], dim=-1)
    cache[slots // SHAPE.block, :, slots % SHAPE.block] = both


def make(backend: Any, config: Any, batch: list[Request], seed: int = 0) -> Scene:
    return Scene(backend, config, SHAPE, batch, torch.device("cpu"), seed)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("seed", range(3))
def test_steps_are_planned_on_what_requests_hold(
    backend: Any, config: Any, queries: int, seed: int
) -> None:
    batch = requests(Random(seed), SHAPE.block, 300, queries)
    scene = make(backend, config, batch, seed)
    judge(scene, scene.attend()).check()
    kinds = [sorted(plan) for plan in Wrapper.plans]
    assert len(kinds) == (1 if queries == 1 else 2)
    planned = torch.cat([plan["seq_lens"] for plan in reversed(Wrapper.plans)])
    assert planned.tolist() == scene.lengths.tolist()  # the device's, to the token
    assert planned.tolist() == [len(keys) for keys, _ in scene.held]


def test_a_bound_that_is_not_exact_is_found(backend: Any, config: Any) -> None:
    """FlashInfer reads as many tokens as the host says: why drafts stay refused."""
    scene = make(backend, config, requests(Random(1), SHAPE.block, 300, 1))
    scene.held = [(keys[:-1], values[:-1]) for keys, values in scene.held[1:]]
    scene.held = [make(backend, config, [Request(1)]).held[0], *scene.held]
    found = scene.attend()
    full = make(backend, config, scene.batch)
    with pytest.raises(AssertionError, match="allowed"):
        judge(full, found).check()


def test_decode_kernels_get_tables_in_one_piece(
    backend: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XQA, which compute capability 9 decodes with: vLLM refuses other tables."""
    stock = sys.modules[VLLM_MODULE]
    monkeypatch.setattr(stock, "can_use_trtllm_attention", lambda *a, **k: True)
    monkeypatch.setattr(stock, "use_trtllm_attention", lambda *a, **k: False)
    monkeypatch.setattr(
        stock.FlashInferMetadataBuilder,
        "_get_flashinfer_trtllm_api_decode_kernel",
        staticmethod(lambda: stock.FlashInferDecodeKernel.XQA),
    )
    scene = make(backend, config, requests(Random(2), SHAPE.block, 300, 1))
    assert not scene.tables.is_contiguous()
    judge(scene, scene.attend()).check()
    assert not Wrapper.plans
    whole = backend.get_builder_cls().__mro__[2]
    assert whole.__name__ == "WholeRowsBuilder"
    monkeypatch.setattr(whole, "build", stock.FlashInferMetadataBuilder.build)
    with pytest.raises(AssertionError) as error:
        scene.attend()
    assert "block_tables_decode" in str(error.traceback[-1].statement)


def test_tables_keep_their_place(backend: Any, config: Any) -> None:
    """A captured graph reads where its tables were."""
    seen = []

    def build(self: Any, prefix: int, common: Any, fast_build: bool = False) -> None:
        seen.append(common.block_table_tensor)

    whole = backend.get_builder_cls().__mro__[2]
    buffer = torch.arange(12, dtype=torch.int32).view(3, 4)

    class Builder(whole):  # type: ignore[misc,valid-type]
        __init__ = object.__init__

    stock = whole.__mro__[1]
    original, stock.build = stock.build, build
    try:
        for tables in (buffer, buffer[:2, :3], buffer[:1, :1]):
            common = SimpleNamespace(block_table_tensor=tables)
            common.replace = lambda **changes: SimpleNamespace(**changes)
            Builder().build(0, common)
    finally:
        stock.build = original
    assert [len(tables) for tables in seen] == [3, 2, 1]
    for tables in seen:
        assert tables.is_contiguous() and tables.data_ptr() == buffer.data_ptr()
        assert torch.equal(tables, buffer[: len(tables)])


@pytest.mark.parametrize(
    ("block_size", "reason"),
    [(16, None), (None, None), (64, None), (128, "--block-size above 64")],
)
def test_what_it_cannot_do_is_said(
    backend: Any, config: Any, block_size: Any, reason: Any
) -> None:
    from vllm.config import set_current_vllm_config

    asked = (64, torch.bfloat16, "auto", block_size, *[False] * 4)
    capability = SimpleNamespace(major=9)
    with set_current_vllm_config(config):
        found = backend.supports_combination(*asked, capability)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found
