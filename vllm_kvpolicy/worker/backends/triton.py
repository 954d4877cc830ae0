"""vLLM's Triton attention with a policy."""

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_kvpolicy.config_values import server_config
from vllm_kvpolicy.worker.backends.mixins import (
    HeadMajorBackendMixin,
    KVPolicyImplMixin,
    KVPolicyMetadataBuilderMixin,
)
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch


class KVPolicyTritonMetadataBuilder(
    KVPolicyMetadataBuilderMixin, TritonAttentionMetadataBuilder
):
    """Stock Triton metadata over physical tables."""

    def folded_layer(
        self, built: Any, batch: FoldedBatch, **changes: Any
    ) -> TritonAttentionMetadata:
        """Return stock metadata of one layer, with scratch for a folded batch.

        Where there are few rows the kernel splits the tokens of each into segments. It
        gets the stock scratch for that, whose axes (token, query head) are viewed as
        (token * KV head, query head of that KV head).
        """
        num_heads = self.num_heads_kv
        for name in ("output", "max", "expsum"):
            scratch = getattr(built, f"softmax_segm_{name}")
            parts = scratch.unflatten(1, (num_heads, -1)).flatten(0, 1)
            changes[f"softmax_segm_{name}"] = parts
        changes["seq_threshold_3D"] = built.seq_threshold_3D * num_heads
        return super().folded_layer(built, batch, **changes)


class KVPolicyTritonImpl(KVPolicyImplMixin, TritonAttentionImpl):
    """Stock Triton attention that saves queries.

    Queries stay in the model's dtype over an FP8 cache, too, where stock rounds them to
    FP8: scorers read them, and the kernel turns keys and values into that dtype.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if server_config(get_current_vllm_config()) is not None:
            self.supports_quant_query_input = False


class KVPolicyTritonBackend(HeadMajorBackendMixin, TritonAttentionBackend):
    """TRITON_ATTN with a policy."""

    impl, builder = KVPolicyTritonImpl, KVPolicyTritonMetadataBuilder
