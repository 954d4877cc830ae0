"""vLLM's FlashAttention with a policy.

worker_gpu puts it in place of FLASH_ATTN. An engine without a policy in the
same process gets stock kernels and metadata, over the cache layout named here.
"""

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_kvpolicy.worker.backends.mixins import (
    HeadMajorBackendMixin,
    KVPolicyImplMixin,
    KVPolicyMetadataBuilderMixin,
)


class KVPolicyFlashMetadataBuilder(
    KVPolicyMetadataBuilderMixin, FlashAttentionMetadataBuilder
):
    """Stock FlashAttention metadata over physical tables.

    FlashAttention 3 can be told before a step how to share out the work of all layers.
    Where heads have lengths of their own that differs from layer to layer: each call
    then works it out by itself, on the device.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.kv_policy is not None and self.kv_policy.config.is_ragged:
            self.aot_schedule = False


class KVPolicyFlashImpl(KVPolicyImplMixin, FlashAttentionImpl):
    """Stock FlashAttention that saves queries."""


class KVPolicyFlashBackend(HeadMajorBackendMixin, FlashAttentionBackend):
    """FLASH_ATTN with a policy."""

    @staticmethod
    def get_impl_cls() -> type[KVPolicyFlashImpl]:
        """Return the implementation class."""
        return KVPolicyFlashImpl

    @staticmethod
    def get_builder_cls() -> type[KVPolicyFlashMetadataBuilder]:
        """Return the metadata builder class."""
        return KVPolicyFlashMetadataBuilder
