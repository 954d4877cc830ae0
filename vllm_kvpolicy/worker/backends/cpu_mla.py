"""vLLM's attention over latent vectors (MLA) on CPUs, with a policy.

Importing this module replaces CPU_MLA. Without a policy it behaves as the stock one.
"""

from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_kvpolicy.worker.backends.mixins import (
    KVPolicyMetadataBuilderMixin,
    LatentBackendMixin,
    WholeRowsMixin,
)


class KVPolicyCPUMLAMetadataBuilder(
    KVPolicyMetadataBuilderMixin, WholeRowsMixin, MLACommonMetadataBuilder
):
    """Stock metadata over physical tables; the kernel for CPUs knows no strides."""


class KVPolicyCPUMLABackend(LatentBackendMixin, CPUMLABackend):
    """CPU_MLA with a policy."""

    impl, builder = CPUMLAImpl, KVPolicyCPUMLAMetadataBuilder


register_backend(AttentionBackendEnum.CPU_MLA, f"{__name__}.KVPolicyCPUMLABackend")
