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

from vllm_kvpolicy.worker.backends.mixins import (
    KVPolicyMetadataBuilderMixin,
    LayerMajorBackendMixin,
    WholeRowsMixin,
)


class KVPolicyCPUMLAMetadataBuilder(
    KVPolicyMetadataBuilderMixin, WholeRowsMixin, MLACommonMetadataBuilder
):
    """Stock metadata; the kernel for CPUs accepts no gaps between rows of a table."""


class KVPolicyCPUMLABackend(LayerMajorBackendMixin, CPUMLABackend):
    """CPU_MLA with a policy."""

    impl, builder = CPUMLAImpl, KVPolicyCPUMLAMetadataBuilder


class KVPolicyTritonMLAMetadataBuilder(
    KVPolicyMetadataBuilderMixin, TritonMLAMetadataBuilder
):
    """Stock metadata."""


class KVPolicyTritonMLABackend(LayerMajorBackendMixin, TritonMLABackend):
    """TRITON_MLA with a policy."""

    impl, builder = TritonMLAImpl, KVPolicyTritonMLAMetadataBuilder
