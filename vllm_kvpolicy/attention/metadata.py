"""Builders that hand the stock builder physical tables and lengths.

Mixed into stock metadata builders by attention.backend_cpu and backend_triton.
Process: worker
"""

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport

from vllm_kvpolicy.config import has_policy


class KVPolicyMetadataBuilderMixin:
    """Replaces the common metadata, then lets the stock builder do its work.

    An engine without a policy in the same process gets the stock metadata untouched:
    its layers carry no runtime.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.kv_policy = getattr(layers[layer_names[0]], "kv_policy", None)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Keep attention out of CUDA graphs: a replay would read the logical tables.

        A full graph reads the tensors of its capture, and `physical` makes new ones;
        nor would a replay save queries. vLLM then captures the pieces in between.
        """
        if has_policy(vllm_config):
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Build the stock metadata of this step; see the stock builder."""
        if self.kv_policy is not None:
            common_attn_metadata = self.kv_policy.physical(common_attn_metadata)
        return super().build(
            common_prefix_len, common_attn_metadata, fast_build, **kwargs
        )


class KVPolicyImplMixin:
    """Saves the queries of requests that are about to have an event."""

    def forward(self, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Run stock attention on the physical tables; see the stock implementation."""
        runtime = getattr(layer, "kv_policy", None)
        if runtime is not None:
            runtime.windows.capture(layer.kv_policy_index, query)
        return super().forward(layer, query, *args, **kwargs)
