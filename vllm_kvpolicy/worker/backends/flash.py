"""vLLM's FlashAttention with a policy.

It replaces FLASH_ATTN where `worker.gpu` is imported. An engine without a policy in the
same process gets stock kernels and metadata, over the cache layout named here.
"""

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_kvpolicy.config import server_config
from vllm_kvpolicy.worker.backends.mixins import (
    HeadMajorBackendMixin,
    KVPolicyImplMixin,
    KVPolicyMetadataBuilderMixin,
)


class KVPolicyFlashMetadataBuilder(
    KVPolicyMetadataBuilderMixin, FlashAttentionMetadataBuilder
):
    """Stock FlashAttention metadata over physical tables.

    FlashAttention 3 can schedule the work of all layers before a step. Where heads have
    lengths of their own the schedule differs from layer to layer, so that each call
    computes its own on the device.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = server_config(vllm_config)
        if config is not None and config.is_ragged:
            self.aot_schedule = False


class KVPolicyFlashImpl(KVPolicyImplMixin, FlashAttentionImpl):
    """Stock FlashAttention that saves queries."""


class KVPolicyFlashBackend(HeadMajorBackendMixin, FlashAttentionBackend):
    """FLASH_ATTN with a policy."""

    @staticmethod
    def get_impl_cls() -> type[KVPolicyFlashImpl]:
        return KVPolicyFlashImpl

    @staticmethod
    def get_builder_cls() -> type[KVPolicyFlashMetadataBuilder]:
        return KVPolicyFlashMetadataBuilder
