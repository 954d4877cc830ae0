"""vLLM's CPU attention with a policy.

Importing this module puts it in place of CPU_ATTN, which is the only door: the CPU
platform ignores a chosen backend. Without a policy it behaves as the stock backend.
Process: worker
"""

from typing import Any

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_kvpolicy.attention.metadata import (
    KVPolicyImplMixin,
    KVPolicyMetadataBuilderMixin,
)


class KVPolicyCPUMetadataBuilder(
    KVPolicyMetadataBuilderMixin, CPUAttentionMetadataBuilder
):
    """Stock CPU metadata over physical tables.

    Where the machine has AMX the stock builder picks a page order of its own for it;
    with a policy the AVX order is used, which `attention.pages` can read.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.kv_policy is not None and self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)


class KVPolicyCPUImpl(KVPolicyImplMixin, CPUAttentionBackendImpl):
    """Stock CPU attention that saves queries."""


class KVPolicyCPUBackend(CPUAttentionBackend):
    """CPU_ATTN with a policy; cache layout and kernels are the stock ones."""

    keys_are_columns = True

    @staticmethod
    def get_impl_cls() -> type[KVPolicyCPUImpl]:
        """Return the implementation class."""
        return KVPolicyCPUImpl

    @staticmethod
    def get_builder_cls() -> type[KVPolicyCPUMetadataBuilder]:
        """Return the metadata builder class."""
        return KVPolicyCPUMetadataBuilder


register_backend(
    AttentionBackendEnum.CPU_ATTN,
    f"{KVPolicyCPUBackend.__module__}.{KVPolicyCPUBackend.__qualname__}",
)
