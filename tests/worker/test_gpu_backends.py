"""What our backends for GPUs tell vLLM and give its kernels; nothing is launched."""

from dataclasses import fields
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvpolicy import compat
from vllm_kvpolicy.worker.backends.flash import KVPolicyFlashMetadataBuilder
from vllm_kvpolicy.worker.backends.triton import (
    KVPolicyTritonImpl,
    KVPolicyTritonMetadataBuilder,
)
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch

HEADS, GROUP, SEGMENTS, SIZE = 2, 3, 4, 8


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN"])
def test_models_leave_writing_to_the_cache_to_vllm(name):
    """vLLM 0.33 asks the backend; FlashInfer's cannot be imported without a GPU."""
    module, _, cls = compat.GPU_BACKENDS[name].rpartition(".")
    backend = getattr(import_module(module), cls)
    assert backend.supports_kv_cache_update_bypass is False


@pytest.mark.parametrize("name", compat.LATENT_BACKENDS)
def test_latent_vectors_keep_the_stock_implementation(name):
    module, _, cls = compat.LATENT_BACKENDS[name].rpartition(".")
    backend = getattr(import_module(module), cls)
    stock = AttentionBackendEnum[name].get_class()
    assert issubclass(backend, stock) and backend.get_name() == name
    assert backend.get_impl_cls() is stock.get_impl_cls()
    assert issubclass(backend.get_builder_cls(), stock.get_builder_cls())
    assert backend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)


@pytest.mark.parametrize(
    ("policy", "is_ahead"), [("ams-tova", True), ("hard-snapkv", False), (None, True)]
)
def test_flash_schedules_ahead_only_where_layers_are_alike(
    monkeypatch: pytest.MonkeyPatch, policy: str | None, is_ahead: bool
) -> None:
    """Its schedule is made once per step, from lengths that all layers share."""

    def stock(self, *given):
        self.aot_schedule = True

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", stock)
    config = SimpleNamespace(
        additional_config={"kv_policy": {"policy": policy}} if policy else {},
        compilation_config=SimpleNamespace(static_forward_context={"layer": None}),
    )
    builder = KVPolicyFlashMetadataBuilder(None, ["layer"], config, None)
    assert builder.aot_schedule is is_ahead


@pytest.mark.parametrize("policy", ["ams-tova", None])
def test_queries_stay_what_they_are_over_an_fp8_cache(
    monkeypatch: pytest.MonkeyPatch, policy: str | None
) -> None:
    """Of engines with a policy alone; vLLM asks the instance before it rounds them."""
    config = VllmConfig()
    if policy:
        config.additional_config = {"kv_policy": {"policy": policy}}
    for name in ("is_cuda", "has_device_capability"):
        monkeypatch.setattr(current_platform, name, lambda *args: True)
    with set_current_vllm_config(config):
        impl = KVPolicyTritonImpl(2, 32, 1.0, 2, None, None, "fp8")
    assert impl.supports_quant_query_input is (policy is None)


def made_metadata(num_rows: int, threshold: int) -> TritonAttentionMetadata:
    """Return stock metadata with scratch of `num_rows` query tokens."""
    values = dict.fromkeys(field.name for field in fields(TritonAttentionMetadata))
    shape = num_rows, HEADS * GROUP, SEGMENTS
    scratch = torch.arange(num_rows * HEADS * GROUP * SEGMENTS).view(shape)
    return TritonAttentionMetadata(
        **values
        | {
            "softmax_segm_max": scratch,
            "softmax_segm_expsum": scratch + 1,
            "softmax_segm_output": scratch[..., None].expand(*shape, SIZE).clone(),
            "seq_threshold_3D": threshold,
        }
    )


@pytest.mark.parametrize(("num_rows", "threshold"), [(5, 5), (2, 5)])
def test_triton_scratch_counts_heads_as_tokens(num_rows, threshold):
    """Its kernel splits a row's tokens where few rows are computed.

    vLLM 0.32 has as much scratch as the threshold of requests; 0.33 has less where
    fewer requests may run, splits rows of up to 8 query tokens as well, and compares
    the scratch's rows with the query tokens first. Both hold for folded batches where
    scratch and threshold grow by the number of KV heads.
    """
    builder = KVPolicyTritonMetadataBuilder.__new__(KVPolicyTritonMetadataBuilder)
    builder.num_heads_kv = HEADS
    built = made_metadata(num_rows, threshold)
    one = torch.ones(1, dtype=torch.int32)
    batch = FoldedBatch(one, one, one, 1, None)
    folded = builder.folded_layer(built, batch)
    assert folded.seq_threshold_3D == threshold * HEADS
    for name in ("output", "max", "expsum"):
        stock = getattr(built, f"softmax_segm_{name}")
        parts = getattr(folded, f"softmax_segm_{name}")
        assert parts.data_ptr() == stock.data_ptr(), "a copy"
        assert len(parts) == num_rows * HEADS
        for token in range(num_rows):
            for head in range(HEADS):
                own = stock[token, head * GROUP : (head + 1) * GROUP]
                assert torch.equal(parts[token * HEADS + head], own)
