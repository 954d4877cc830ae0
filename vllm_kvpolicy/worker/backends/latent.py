"""vLLM's attention over latent vectors (MLA) with a policy, on CPUs and on GPUs.

A page has one vector per token, for all heads of a layer. Metadata are stock's over
physical tables, implementations are stock's alone: `worker.latents` watches the layers.
"""

from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvpolicy.worker.backends.mixins import (
    KVPolicyBackendMixin,
    KVPolicyMetadataBuilderMixin,
    WholeRowsMixin,
)


class LatentBackendMixin(KVPolicyBackendMixin):
    """A backend whose layers lie one after the other, each with its blocks."""

    keys_are_columns = False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the only layout in which pages of all layers are one list."""
        return (KVCacheLayout.LBHNC,)


class KVPolicyCPUMLAMetadataBuilder(
    KVPolicyMetadataBuilderMixin, WholeRowsMixin, MLACommonMetadataBuilder
):
    """Stock metadata; the kernel for CPUs accepts no gaps between rows of a table."""


class KVPolicyCPUMLABackend(LatentBackendMixin, CPUMLABackend):
    """CPU_MLA with a policy."""

    impl, builder = CPUMLAImpl, KVPolicyCPUMLAMetadataBuilder


class KVPolicyTritonMLAMetadataBuilder(
    KVPolicyMetadataBuilderMixin, TritonMLAMetadataBuilder
):
    """Stock metadata."""


class KVPolicyTritonMLABackend(LatentBackendMixin, TritonMLABackend):
    """TRITON_MLA with a policy."""

    impl, builder = TritonMLAImpl, KVPolicyTritonMLAMetadataBuilder
