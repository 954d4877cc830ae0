"""Stock builders and implementations over physical tables and lengths.

Mixed into vLLM's own classes by worker.backends.cpu, backend_flash and
backend_triton.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvpolicy.config import server_config
from vllm_kvpolicy.worker.tiers.page_selection import SelectedBatch, selecting
from vllm_kvpolicy.worker.tiers.ragged_step import (
    FoldedBatch,
    LayerBatch,
    fold_queries,
    unfold_output,
)


@dataclass(frozen=True)
class FoldedMetadata:
    """What the attention of each layer needs where heads have tables of their own.

    Args:
        batch: page tables per head.
        stock: returns stock metadata over what one layer reads.
        max_queries: no request has more tokens in this step.
    """

    batch: FoldedBatch | SelectedBatch
    stock: Callable[[LayerBatch], Any]
    max_queries: int


class KVPolicyMetadataBuilderMixin:
    """Replaces the common metadata, then lets the stock builder do its work.

    An engine without a policy in the same process gets the stock metadata untouched:
    its layers carry no runtime.
    """

    # vLLM would put its own tables into metadata of ours.
    supports_update_block_table = False

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
        """Return what the stock builder does; less where heads have their own tables.

        Queries of several tokens of a request are reordered for those, outside graphs.
        Where queries choose what they read, or tokens say until when they are seen, so
        is all attention.
        """
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        config = server_config(vllm_config)
        if config is None or not config.is_ragged:
            return support
        if selecting(config) or config.is_exact:
            return AttentionCGSupport.NEVER
        most = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(support, most, key=lambda each: each.value)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Build the stock metadata of this step; see the stock builder."""
        runtime = self.kv_policy
        if runtime is None:
            return super().build(
                common_prefix_len, common_attn_metadata, fast_build, **kwargs
            )
        runtime.plan_measurements(common_attn_metadata)
        built = super().build(
            common_prefix_len,
            runtime.physical(common_attn_metadata),
            fast_build,
            **kwargs,
        )
        folded = runtime.folded(common_attn_metadata)
        if folded is not None:
            built.kv_policy = FoldedMetadata(
                folded,
                partial(self.folded_layer, built),
                common_attn_metadata.max_query_len,
            )
        return built

    def folded_layer(self, built: Any, batch: LayerBatch, **changes: Any) -> Any:
        """Return stock metadata of one layer over a folded batch.

        Args:
            built: the stock metadata of the step.
            batch: what the layer reads.
            **changes: fields that the backend keeps beside those that all have.
        """
        return replace(
            built,
            num_actual_tokens=batch.num_tokens,
            query_start_loc=batch.query_start,
            max_seq_len=batch.max_length,
            seq_lens=batch.lengths,
            block_table=batch.tables,
            **changes,
        )


class HeadMajorBackendMixin:
    """A backend for GPUs: stock kernels, block interiors head-major."""

    keys_are_columns = False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the one order in which a head's page is contiguous."""
        return (KVCacheLayout.LBHNC,)


class KVPolicyImplMixin:
    """Saves the queries of requests near an event; attends per head where asked."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run stock attention on the physical tables; see the stock implementation."""
        runtime = getattr(layer, "kv_policy", None)
        attend = super().forward
        folded = getattr(attn_metadata, "kv_policy", None)
        if runtime is not None:
            runtime.observe(layer.kv_policy_index, query, key, value)
        if runtime is None or folded is None:
            kept = (query, key, value, kv_cache, attn_metadata, output)
            return attend(layer, *kept, *args, **kwargs)
        index, num_heads = layer.kv_policy_index, self.num_kv_heads
        batch = folded.batch.of_layer(index, query)
        num_tokens = batch.num_tokens // num_heads
        queries = fold_queries(query[:num_tokens], num_heads, batch.order)
        # One token per request: rows (request, KV head) are a view of the batch.
        result = (
            output[:num_tokens].view(queries.shape)
            if batch.order is None
            else torch.empty_like(queries)
        )
        if batch.ends is not None:
            sizes = self.scale, folded.max_queries
            runtime.expiries.attend(index, batch, queries, result, *sizes)
        else:
            pages, metadata = runtime.pool.pages_of(index), folded.stock(batch)
            attend(layer, queries, key, value, pages, metadata, result, *args, **kwargs)
        if batch.order is not None:
            output[:num_tokens] = unfold_output(result, num_heads, batch.order)
        return output
