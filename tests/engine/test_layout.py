"""Page views read the cache as the CPU kernels write it, also on AMX machines."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.engine.helpers import Engine, make_jobs
from vllm_kvpolicy import compat
from vllm_kvpolicy.worker.pages import PagePool, check_layout

NUM_BLOCKS, NUM_HEADS, HEAD_DIM = 5, 2, 64
CASES = [
    (block_size, dtype)
    for block_size in (32, 64)
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.fixture
def layer(policy_config, request) -> SimpleNamespace:
    """An attention layer as far as writing to the cache goes."""
    from vllm.config import set_current_vllm_config

    from vllm_kvpolicy.worker.backends.cpu import KVPolicyCPUImpl

    block_size, dtype = request.param
    with set_current_vllm_config(policy_config):
        impl = KVPolicyCPUImpl(
            2 * NUM_HEADS, HEAD_DIM, 1.0, NUM_HEADS, None, None, "auto"
        )
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, block_size, 2 * HEAD_DIM, dtype=dtype)
    return SimpleNamespace(
        impl=impl, kv_cache=cache, isa="vec", _k_scale_float=1.0, _v_scale_float=1.0
    )


@pytest.mark.parametrize("layer", CASES, indirect=True, ids=str)
def test_every_slot_is_read_where_it_was_written(layer: SimpleNamespace) -> None:
    cache = layer.kv_cache
    slots = torch.randperm(NUM_BLOCKS * cache.shape[2])
    sample = torch.randn(2, len(slots), NUM_HEADS, HEAD_DIM).to(cache.dtype)
    layer.impl.do_kv_cache_update(layer, sample[0], sample[1], cache, slots)
    pool = PagePool([cache], True)
    own = pool.own_pages((slots // cache.shape[2])[None])[0, 0].T
    parts = (pool.keys[0], pool.values[0])
    for pages, written in zip(parts, sample, strict=True):
        assert torch.equal(pages[own, (slots % cache.shape[2])[:, None]], written)
        assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


@pytest.mark.parametrize("layer", CASES, indirect=True, ids=str)
def test_the_check_tells_orders_apart(layer: SimpleNamespace) -> None:
    right, wrong = (PagePool([layer.kv_cache], order) for order in (True, False))
    check_layout(layer, right, 0)
    assert not layer.kv_cache.any()
    with pytest.raises(RuntimeError, match="layout that this release does not support"):
        check_layout(layer, wrong, 0)
    assert not layer.kv_cache.any()


def test_vllm_runs_the_library_for_the_cpu_that_torch_tells() -> None:
    """So `make test-all` can run another than the one that is best here."""
    from vllm import _custom_ops  # noqa: F401

    is_older = not torch.cpu._is_avx512_supported()
    assert ("/vllm/_C_AVX2." in Path("/proc/self/maps").read_text()) == is_older
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        assert is_older and torch.backends.cpu.get_cpu_capability() == "AVX2"
        assert not compat.multiplies_bfloat16()


@pytest.mark.parametrize("block_size", [32, 64])
def test_amx_machines_use_the_known_order(
    tiny_model: Path, tmp_path: Path, monkeypatch, block_size: int
) -> None:
    """vLLM packs keys for AMX where it can; with a policy it must not."""
    from vllm.v1.attention.backends import cpu_attn

    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        assert cpu_attn._get_attn_isa(torch.bfloat16, block_size, 32) == "amx"
    # Attention alone: linear layers would run what this CPU may lack.
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "amx")
    values = {"policy": "ams-snapkv", "budget": 160, "interval": 64}
    with Engine(
        tiny_model, values, tmp_path, dtype="bfloat16", block_size=block_size
    ) as engine:
        assert {layer.isa for layer in engine.worker.kv_policy_setup.layers} == {"vec"}
        assert engine.runtime.compactor.pool.keys[0].dtype is torch.bfloat16
        engine.run(make_jobs((100, 300), 200, seed=30))
        counters = engine.counters()
    assert counters["events"] >= 4
    assert counters["tokens_dropped"] > 0
