"""vLLM's FlashInfer attention with a policy.

FlashInfer plans a step on the host. vLLM's upper bound on lengths is exact there unless
tokens are speculated, and events drop whole superblocks, which the scheduler counts.
Where heads have lengths of their own only the device knows them; guards refuse that.
"""

from typing import Any

from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)

from vllm_kvpolicy.worker.backends.mixins import (
    HeadMajorBackendMixin,
    KVPolicyImplMixin,
    KVPolicyMetadataBuilderMixin,
    WholeRowsMixin,
)

MAX_PAGE_TOKENS = 64  # of all its kernels; vLLM cuts larger blocks for them


class KVPolicyFlashInferMetadataBuilder(
    KVPolicyMetadataBuilderMixin, WholeRowsMixin, FlashInferMetadataBuilder
):
    """Stock FlashInfer metadata over physical tables.

    Some decode kernels (XQA, TensorRT-LLM) accept no rows with gaps between them.
    """


class KVPolicyFlashInferImpl(KVPolicyImplMixin, FlashInferImpl):
    """Stock FlashInfer attention that saves queries."""


class KVPolicyFlashInferBackend(HeadMajorBackendMixin, FlashInferBackend):
    """FLASHINFER with a policy."""

    impl, builder = KVPolicyFlashInferImpl, KVPolicyFlashInferMetadataBuilder

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: Any,
        block_size: Any,
        *rest: Any,
    ) -> str | None:
        """Return why vLLM cannot choose this backend, None if it can."""
        if block_size is not None and block_size > MAX_PAGE_TOKENS:
            return f"--block-size above {MAX_PAGE_TOKENS}, which FlashInfer splits"
        return super().supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, *rest
        )
