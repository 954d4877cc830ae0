"""vLLM's CPU attention with a policy.

Importing this module replaces CPU_ATTN, which is the only way in: the CPU platform
ignores a chosen backend. Without a policy it behaves as the stock backend.
"""

from typing import Any

from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_kvpolicy import compat
from vllm_kvpolicy.worker.backends.mixins import (
    KVPolicyBackendMixin,
    KVPolicyImplMixin,
    KVPolicyMetadataBuilderMixin,
)
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch


class KVPolicyCPUMetadataBuilder(
    KVPolicyMetadataBuilderMixin, CPUAttentionMetadataBuilder
):
    """Stock CPU metadata over physical tables.

    On a machine with AMX the stock builder uses another page order; with a policy it
    uses the AVX order, which `worker.pages` can read.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if self.kv_policy_config is not None and self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)

    def folded_layer(
        self, built: Any, batch: FoldedBatch, **changes: Any
    ) -> CPUAttentionMetadata:
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(batch.lengths),
            num_heads=self.num_heads // self.num_kv_heads,
            num_kv_heads=1,
            head_dim=self.head_dim,
            seq_lens=batch.lengths,
            dtype=self.dtype,
            query_start_loc=batch.query_start,
            causal=True,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=compat.environment_flag("VLLM_CPU_ATTN_SPLIT_KV"),
            kv_cache_dtype=self.kv_cache_dtype,
        )
        changes["scheduler_metadata"] = schedule
        return super().folded_layer(built, batch, **changes)


class KVPolicyCPUImpl(KVPolicyImplMixin, CPUAttentionBackendImpl):
    """Stock CPU attention that saves queries."""


class KVPolicyCPUBackend(KVPolicyBackendMixin, CPUAttentionBackend):
    """CPU_ATTN with a policy; cache layout and kernels are the stock ones."""

    keys_are_columns = True
    impl, builder = KVPolicyCPUImpl, KVPolicyCPUMetadataBuilder


register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.KVPolicyCPUBackend")
