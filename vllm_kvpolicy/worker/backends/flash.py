"""vLLM's FlashAttention with a policy."""

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

    FlashAttention 3 can schedule the work of all layers before a step. Where heads have
    lengths of their own the schedule differs from layer to layer, so that each call
    computes its own on the device.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if self.kv_policy_config is not None and self.kv_policy_config.is_ragged:
            self.aot_schedule = False


class KVPolicyFlashImpl(KVPolicyImplMixin, FlashAttentionImpl):
    """Stock FlashAttention that saves queries."""


class KVPolicyFlashBackend(HeadMajorBackendMixin, FlashAttentionBackend):
    """FLASH_ATTN with a policy."""

    impl, builder = KVPolicyFlashImpl, KVPolicyFlashMetadataBuilder
