"""Stock builders and implementations over physical tables and lengths.

Mixed into vLLM's own classes by attention.backend_cpu, backend_flash and
backend_triton.
Process: worker
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvpolicy.attention.folding import (
    FoldedBatch,
    fold_queries,
    unfold_output,
)
from vllm_kvpolicy.attention.selection import SelectedBatch, selecting
from vllm_kvpolicy.config import server_config


@dataclass(frozen=True)
class FoldedMetadata:
    """What the attention of each layer needs where heads have tables of their own.

    Args:
        order: see `folding.FoldedBatch`.
        of_layer: returns stock metadata of the layer with this index, given the step's
            queries, [T, Hq, D] model dtype, post-RoPE.
    """

    order: torch.Tensor | None
    of_layer: Callable[[int, torch.Tensor], Any]


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
        Where queries choose what they read, so is all attention.
        """
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        config = server_config(vllm_config)
        if config is None or not config.is_ragged:
            return support
        if selecting(config):
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
                folded.order, partial(self._of_layer, built, folded)
            )
        return built

    def _of_layer(
        self,
        built: Any,
        folded: FoldedBatch | SelectedBatch,
        layer: int,
        query: torch.Tensor,
    ) -> Any:
        """Return stock metadata of one layer; see `FoldedMetadata`."""
        if isinstance(folded, SelectedBatch):
            return self.folded_layer(built, folded.of_layer(layer, query), 0)
        return self.folded_layer(built, folded, layer)

    def folded_layer(
        self, built: Any, folded: FoldedBatch, layer: int, **changes: Any
    ) -> Any:
        """Return stock metadata of one layer over the folded batch.

        Args:
            built: the stock metadata of the step.
            folded: page tables per head.
            layer: index of the layer in model order.
            **changes: fields that the backend keeps beside those that all have.
        """
        return replace(
            built,
            num_actual_tokens=len(folded.lengths[layer])
            if folded.order is None
            else len(folded.order),
            query_start_loc=folded.query_start,
            max_seq_len=folded.max_length,
            seq_lens=folded.lengths[layer],
            block_table=folded.tables[layer],
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
        index, num_heads, order = layer.kv_policy_index, self.num_kv_heads, folded.order
        metadata = folded.of_layer(index, query)
        num_tokens = metadata.num_actual_tokens // num_heads
        queries = fold_queries(query[:num_tokens], num_heads, order)
        # One token per request: rows (request, KV head) are a view of the batch.
        result = (
            output[:num_tokens].view(queries.shape)
            if order is None
            else torch.empty_like(queries)
        )
        pages = runtime.pool.pages_of(index)
        attend(layer, queries, key, value, pages, metadata, result, *args, **kwargs)
        if order is not None:
            output[:num_tokens] = unfold_output(result, num_heads, order)
        return output
