"""vLLM's Triton attention with a policy.

worker_gpu puts it in place of TRITON_ATTN. An engine without a policy in
the same process gets stock kernels and metadata, over the cache layout named here.
Process: worker
"""

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_kvpolicy.attention.metadata import (
    HeadMajorBackendMixin,
    KVPolicyImplMixin,
    KVPolicyMetadataBuilderMixin,
)


class KVPolicyTritonMetadataBuilder(
    KVPolicyMetadataBuilderMixin, TritonAttentionMetadataBuilder
):
    """Stock Triton metadata over physical tables."""


class KVPolicyTritonImpl(KVPolicyImplMixin, TritonAttentionImpl):
    """Stock Triton attention that saves queries."""


class KVPolicyTritonBackend(HeadMajorBackendMixin, TritonAttentionBackend):
    """TRITON_ATTN with a policy."""

    @staticmethod
    def get_impl_cls() -> type[KVPolicyTritonImpl]:
        """Return the implementation class."""
        return KVPolicyTritonImpl

    @staticmethod
    def get_builder_cls() -> type[KVPolicyTritonMetadataBuilder]:
        """Return the metadata builder class."""
        return KVPolicyTritonMetadataBuilder
