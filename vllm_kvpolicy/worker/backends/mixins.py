"""What a policy adds to vLLM's metadata builders and attention implementations."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvpolicy.config_values import server_config
from vllm_kvpolicy.worker.runtime import KVPolicyRuntime
from vllm_kvpolicy.worker.tiers.head_tables import (
    FoldedBatch,
    fold_queries,
    unfold_output,
)
from vllm_kvpolicy.worker.tiers.page_selection import selecting


class KVPolicyMetadataBuilderMixin:
    """Replaces the common metadata and passes it on to the stock builder.

    An engine without a policy in the same process gets the stock metadata untouched:
    its layers carry no runtime.
    """

    # vLLM would put its own tables into metadata of ours.
    supports_update_block_table = False

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: Any,
        *rest: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *rest)
        self.kv_policy_config = server_config(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        self._first_layer = layers[layer_names[0]]

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Return the stock builder's support, or less where heads have own tables.

        With those, steps with several tokens of a request reorder queries, which graphs
        cannot contain. Where queries choose what they read, or tokens are masked as
        soon as they are dropped, no attention can be captured.
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
        runtime: KVPolicyRuntime | None = getattr(
            self._first_layer, "kv_policy_runtime", None
        )
        if runtime is None:  # no policy, or no KV cache yet
            return super().build(
                common_prefix_len, common_attn_metadata, fast_build, **kwargs
            )
        step = runtime.build(common_attn_metadata)
        built = super().build(common_prefix_len, step.common, fast_build, **kwargs)
        if step.folded is not None:
            built.kv_policy_folded = step
            built.kv_policy_stock = partial(self.folded_layer, built)
        return built

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        """Build the metadata of a pass of layers that draft; see the stock builder."""
        runtime = getattr(self._first_layer, "kv_policy_runtime", None)
        if runtime is not None:
            runtime.draft(draft_index)
        return super().build_for_drafting(common_attn_metadata, draft_index)

    def folded_layer(self, built: Any, batch: FoldedBatch, **changes: Any) -> Any:
        """Return stock metadata of one layer over a folded batch.

        Args:
            **changes: fields that the backend has in addition to the common ones.
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


class WholeRowsMixin:
    """Gives a stock builder tables whose rows are contiguous.

    Physical tables are the first columns of a wider buffer; all of its columns together
    are contiguous.
    """

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> Any:
        tables = common_attn_metadata.block_table_tensor
        columns = tables.stride(0)
        whole = tables.as_strided((len(tables), columns), (columns, 1))
        common = common_attn_metadata.replace(block_table_tensor=whole)
        return super().build(common_prefix_len, common, fast_build)


class KVPolicyBackendMixin:
    """Names the two classes of a backend."""

    impl: ClassVar[type]
    builder: ClassVar[type]

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder


class LayerMajorBackendMixin(KVPolicyBackendMixin):
    """A backend whose layers lie one after the other, each with its blocks."""

    keys_are_columns = False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the only layout in which pages, of all layers, are one list."""
        return (KVCacheLayout.LBHNC,)


class HeadMajorBackendMixin(LayerMajorBackendMixin):
    """A backend for GPUs: stock kernels over head-major blocks.

    It replaces a stock one where `worker.gpu` is imported. An engine without a policy
    in the same process gets stock kernels and metadata, over the cache layout here.
    """

    # From vLLM 0.33 on, a model may write to the cache itself and pass no keys, which
    # events need to see; of a backend that says no it does not ask that.
    supports_kv_cache_update_bypass = False


class KVPolicyImplMixin:
    """Shows new tokens to the captures; attends per head where tables say so."""

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
        runtime = getattr(layer, "kv_policy_runtime", None)
        attend = super().forward
        step = getattr(attn_metadata, "kv_policy_folded", None)
        if runtime is not None and key is not None:  # none where it reads others'
            runtime.observe(layer.kv_policy_index, query, key, value)
        if runtime is None or step is None:
            kept = (query, key, value, kv_cache, attn_metadata, output)
            return attend(layer, *kept, *args, **kwargs)
        index, num_heads = layer.kv_policy_index, self.num_kv_heads
        batch = step.folded.of_layer(index, query)
        num_tokens = batch.num_tokens // num_heads
        queries = fold_queries(query[:num_tokens], num_heads, batch.order)
        # One token per request: rows (request, KV head) are a view of the batch.
        result = (
            output[:num_tokens].view(queries.shape)
            if batch.order is None
            else torch.empty_like(queries)
        )
        if step.exact is not None:
            sizes = self.scale, step.common.max_query_len
            step.exact.attend(index, batch, queries, result, *sizes)
        else:
            pages = runtime.tier.pool.pages.unsqueeze(1)
            metadata = attn_metadata.kv_policy_stock(batch)
            attend(layer, queries, key, value, pages, metadata, result, *args, **kwargs)
        if batch.order is not None:
            output[:num_tokens] = unfold_output(result, num_heads, batch.order)
        return output
