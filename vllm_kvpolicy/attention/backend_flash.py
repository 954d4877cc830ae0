"""vLLM's FlashAttention with a policy.

worker_gpu puts it in place of FLASH_ATTN. An engine without a policy in the
same process gets stock kernels and metadata, over the cache layout named here.
Process: worker
"""

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_kvpolicy.attention.metadata import (
    HeadMajorBackendMixin,
    KVPolicyImplMixin,
    KVPolicyMetadataBuilderMixin,
)


class KVPolicyFlashMetadataBuilder(
    KVPolicyMetadataBuilderMixin, FlashAttentionMetadataBuilder
):
    """Stock FlashAttention metadata over physical tables."""


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
