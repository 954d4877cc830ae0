"""What our classes override and read of vLLM, as one table.

A row is a class or module of vLLM that is not wrapped (see `api.patch_table`) but
overridden by a class of ours, or read beyond what vLLM documents. Every name is listed
with the class whose body defines it, as in the tested release; where others differ is
in `compat.RELEASES`. `rows` says what a release has changed or dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# The signature of an override that hands on whatever it is given.
ANY = "*"


@dataclass(frozen=True)
class Owner:
    """A class or module of vLLM.

    Args:
        target: "module:Class", or "module" for its functions.
        overridden: method or attribute -> how it is declared, in the form of
            `patch_table.signature_of`; `ANY` where ours hands on all that it is given;
            "" for what is no method.
        read: names of attributes and methods that we read, blanks between them.
        abstract: names of all methods that a class of ours must have to be made, blanks
            between them; None where a class of vLLM in between has them.
    """

    target: str
    overridden: Mapping[str, str] = field(default_factory=dict)
    read: str = ""
    abstract: str | None = None

    def path(self, name: str) -> str:
        """Return "module:name" or "module:Class.name"."""
        return f"{self.target}{'.' if ':' in self.target else ':'}{name}"


_EXTRA_KEYS = "generate_block_hash_extra_keys"
_CACHE_BLOCKS = "self request num_tokens retention_interval * replay_boundaries"
_ENGINE = (
    Owner(
        "vllm.v1.core.sched.scheduler:Scheduler",
        {
            "__init__": ANY,
            "add_request": "self request",
            "schedule": ANY,
            "update_from_output": "self scheduler_output model_runner_output",
            "set_pause_state": "self pause_state",
            "shutdown": "self",
            "_free_request": ANY,
            "_get_local_prefix_cache_hit": "self request",
            "_handle_blocked_waiting_request": "self request",
            "_mamba_block_aligned_split": (
                "self request num_new_tokens num_new_local_computed_tokens "
                "num_external_computed_tokens"
            ),
            "_preempt_request": ANY,
            "_reserve_prefill_lookahead": (
                "self request num_computed_tokens num_new_tokens"
            ),
            "_update_after_schedule": "self scheduler_output",
        },
        read=(
            "kv_cache_manager perf_metrics requests running waiting pause_state "
            "max_num_active_reqs num_waiting_for_streaming_input vllm_config "
            "lora_config _is_blocked_waiting_status"
        ),
    ),
    Owner(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        {"__init__": ANY, "_update_after_schedule": "self scheduler_output"},
    ),
    Owner(
        "vllm.v1.core.sched.output:SchedulerOutput",
        read=(
            "num_scheduled_tokens total_num_scheduled_tokens finished_req_ids "
            "preempted_req_ids scheduled_cached_reqs"
        ),
    ),
    Owner(
        "vllm.v1.core.sched.output:CachedRequestData",
        read="num_computed_tokens req_ids",
    ),
    Owner(
        "vllm.v1.metrics.perf:ModelMetrics",
        {"get_step_perf_stats_per_gpu": "self scheduler_output"},
    ),
    Owner(
        "vllm.v1.request:Request",
        read=(
            "request_id sampling_params num_prompt_tokens num_computed_tokens "
            "num_in_flight_tokens cache_salt block_hashes update_block_hashes "
            "all_token_ids num_tokens _block_hasher num_stale_output_tokens "
            "drop_stale_output lora_request"
        ),
    ),
    Owner(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        read=(
            "coordinator block_pool empty_kv_cache_blocks truncate_computed_blocks "
            "create_kv_cache_blocks estimate_cached_tokens"
        ),
    ),
    Owner(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        read="single_type_managers allocate_new_blocks find_longest_cache_hit",
    ),
    Owner(
        "vllm.v1.engine:EngineCoreReadyResponse",
        read="instance_id num_gpu_blocks data_parallel_rank",
    ),
    Owner(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        {
            "get_num_blocks_to_allocate": (
                "self request_id num_tokens new_computed_blocks total_computed_tokens "
                "num_local_computed_tokens num_tokens_main_model apply_admission_cap "
                "prefill_end"
            ),
            "pop_blocks_for_free": "self request_id",
            "allocate_new_blocks": "self request_id num_tokens num_tokens_main_model",
            "has_positionally_stable_blocks": "@property self",
            "new_step_starts": "self",
        },
        read=(
            "block_pool block_size enable_caching num_cached_block req_to_blocks "
            "_null_block cache_blocks"
        ),
    ),
    Owner(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        {"cache_blocks": _CACHE_BLOCKS},
    ),
    Owner(
        "vllm.v1.core.block_pool:BlockPool",
        read=(
            "num_gpu_blocks get_num_free_blocks get_new_blocks free_blocks "
            "is_block_writable evict_blocks"
        ),
    ),
    Owner("vllm.v1.core.kv_cache_utils", read="hash_block_tokens " + _EXTRA_KEYS),
    Owner("vllm.utils.hashing", read="get_hash_fn_by_name"),
    Owner(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        read="block_id block_hash ref_cnt is_null",
    ),
    Owner(
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        {"max_memory_usage_bytes": "self vllm_config"},
    ),
    Owner("vllm.v1.kv_cache_interface:AttentionSpec", read="page_size_bytes"),
    Owner(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry",
        read="register _ensure_registered",
    ),
)

_WORKER = (
    Owner(
        "vllm.v1.worker.gpu_worker:Worker",
        {
            "load_model": ANY,
            "get_kv_cache_spec": "self",
            "determine_available_memory": "self",
            "initialize_from_config": "self kv_cache_config",
            "compile_or_warm_up_model": "self",
            "execute_model": "self scheduler_output",
            "sample_tokens": "self grammar_output",
        },
        read="use_v2_model_runner",
    ),
    Owner(
        "vllm.v1.worker.cpu_worker:CPUWorker", {"determine_available_memory": "self"}
    ),
    Owner(
        "vllm.v1.worker.worker_base:WorkerBase",
        read="cache_config device model_config model_runner vllm_config",
    ),
    Owner(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        read="discard_request_mask get_model input_batch",
    ),
    Owner(
        "vllm.v1.worker.gpu_input_batch:InputBatch", read="generators num_reqs req_ids"
    ),
    Owner(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner", read="get_model prepare_attn"
    ),
    Owner("vllm.v1.worker.gpu.input_batch:InputBatch", read="req_ids"),
    Owner("vllm.distributed.parallel_state", read="get_tp_group"),
    Owner(
        "vllm.distributed.parallel_state:GroupCoordinator",
        read="broadcast_object device_group rank_in_group world_size",
    ),
    Owner(
        "vllm.config.model:ModelConfig",
        read="get_num_attention_heads get_num_kv_heads get_total_num_kv_heads",
    ),
    Owner(
        "vllm.config.model_arch:ModelArchitectureConfig",
        read="head_size total_num_attention_heads total_num_kv_heads __getitem__",
    ),
    Owner("vllm.config.vllm:VllmConfig", read="num_lookahead_tokens"),
    Owner(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        {"get_output": "self"},
        abstract="get_output",
    ),
    Owner(
        "vllm.model_executor.layers.attention.attention:Attention",
        read=(
            "attn_backend dtype impl kv_cache_torch_dtype "
            "kv_sharing_target_layer_name num_heads num_kv_heads"
        ),
    ),
    Owner(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase",
        read="cos_sin_cache is_neox_style",
    ),
    *(
        Owner(f"vllm.model_executor.models.{name}", {"load_weights": "self weights"})
        for name in ("llama:LlamaForCausalLM", "qwen3:Qwen3ForCausalLM")
    ),
)

_BUILD = "self common_prefix_len common_attn_metadata fast_build"
_MAKE_BUILDER = "self kv_cache_spec layer_names vllm_config device"
_FORWARD = (
    "self layer query key value kv_cache attn_metadata output output_scale "
    "output_block_scale"
)
_VARLEN = "supports_dcp_with_varlen"
_IMPL_READS = "alibi_slopes do_kv_cache_update logits_soft_cap num_kv_heads scale sinks"
_BACKEND = {"get_builder_cls": "@staticmethod", "get_impl_cls": "@staticmethod"}
_LAYOUTS = "@classmethod cls"
_CUDAGRAPHS = "@classmethod cls vllm_config kv_cache_spec"

_ATTENTION = (
    Owner("vllm.v1.attention.selector", read="_cached_get_attn_backend"),
    Owner(
        "vllm.v1.attention.backends.registry",
        read="AttentionBackendEnum register_backend",
    ),
    Owner(
        "vllm.v1.attention.backend:AttentionBackend",
        {"supported_kv_cache_layouts": _LAYOUTS},
    ),
    Owner(
        "vllm.v1.attention.backend:AttentionMetadataBuilder",
        {
            "build_for_drafting": "self common_attn_metadata draft_index",
            "get_cudagraph_support": _CUDAGRAPHS,
            "supports_update_block_table": "",
        },
    ),
    Owner(
        "vllm.v1.attention.backend:AttentionLayer",
        read="_k_scale _k_scale_float _v_scale _v_scale_float",
    ),
    Owner(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        read=(
            "block_table_tensor max_query_len max_seq_len num_actual_tokens num_reqs "
            "query_start_loc query_start_loc_cpu replace seq_lens "
            "seq_lens_cpu_upper_bound _num_computed_tokens_cache"
        ),
    ),
    Owner(
        "vllm.v1.attention.backend:AttentionCGSupport",
        read="NEVER UNIFORM_SINGLE_TOKEN_DECODE",
    ),
    Owner("vllm.v1.kv_cache_layout:KVCacheLayout", read="LBHNC"),
    Owner(
        "vllm.model_executor.layers.attention.attention:Attention",
        read="kv_cache_dtype kv_cache_torch_dtype",
    ),
    Owner("vllm.config.compilation:CompilationConfig", read="static_forward_context"),
)

_CPU = (
    Owner("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend", _BACKEND),
    Owner(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder",
        {"__init__": _MAKE_BUILDER, "build": _BUILD},
        read=(
            "dtype head_dim isa kv_cache_dtype num_heads num_kv_heads window_size "
            "_set_isa_to_layers"
        ),
    ),
    Owner(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        {"forward": _FORWARD},
        read=_IMPL_READS,
    ),
    Owner("vllm._custom_ops", read="cpu_attn_get_scheduler_metadata"),
)

_CUDA = (
    Owner(
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention",
        read=(
            "attn_backend forward_impl impl kv_cache_dtype kv_lora_rank num_heads "
            "num_kv_heads qk_nope_head_dim qk_rope_head_dim use_sparse"
        ),
    ),
    Owner(
        "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder",
        {"build": _BUILD, "__init__": f"{_MAKE_BUILDER} metadata_cls {_VARLEN}"},
    ),
    Owner(
        "vllm.model_executor.layers.attention.mla_attention:MLACommonBackend",
        {"get_builder_cls": "@staticmethod"},
    ),
    Owner(
        "vllm.v1.attention.backends.mla.triton_mla:TritonMLAMetadataBuilder",
        {"__init__": _MAKE_BUILDER},
    ),
    Owner(
        "vllm.v1.attention.backends.mla.cpu_mla:CPUMLABackend",
        {"get_impl_cls": "@staticmethod"},
    ),
    Owner(
        "vllm.v1.attention.backends.mla.cpu_mla:CPUMLAImpl", read="do_kv_cache_update"
    ),
    Owner("vllm.v1.attention.backends.mla.triton_mla:TritonMLABackend", _BACKEND),
    Owner("vllm.v1.attention.backends.flash_attn:FlashAttentionBackend", _BACKEND),
    Owner(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder",
        {
            "__init__": _MAKE_BUILDER,
            "build": _BUILD,
            "get_cudagraph_support": _CUDAGRAPHS,
            "supports_update_block_table": "",
        },
        read="aot_schedule",
    ),
    Owner(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
        {"forward": _FORWARD},
        read=_IMPL_READS,
    ),
    Owner("vllm.v1.attention.backends.triton_attn:TritonAttentionBackend", _BACKEND),
    Owner(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder",
        {"__init__": _MAKE_BUILDER, "build": _BUILD},
        read="num_heads_kv",
    ),
    Owner(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata",
        read=(
            "seq_threshold_3D softmax_segm_expsum softmax_segm_max softmax_segm_output"
        ),
    ),
    Owner(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl",
        {"__init__": ANY, "forward": _FORWARD},
        read=f"{_IMPL_READS} supports_quant_query_input",
    ),
    Owner(
        "vllm.v1.attention.backends.flashinfer:FlashInferBackend",
        {
            **_BACKEND,
            "supported_kv_cache_layouts": _LAYOUTS,
            "supports_combination": (
                "@classmethod cls head_size dtype kv_cache_dtype block_size use_mla "
                "has_sink use_sparse use_mm_prefix device_capability"
            ),
        },
    ),
    Owner(
        "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder",
        {
            "__init__": _MAKE_BUILDER,
            "build": _BUILD,
            "get_cudagraph_support": _CUDAGRAPHS,
        },
    ),
    Owner(
        "vllm.v1.attention.backends.flashinfer:FlashInferImpl",
        {"forward": _FORWARD},
        read=_IMPL_READS,
    ),
)

_API = (
    Owner("vllm.entrypoints.llm:LLM", {"__init__": ANY}),
    Owner(
        "vllm.engine.arg_utils:EngineArgs",
        read=(
            "additional_config attention_backend attention_config block_size "
            "hf_overrides _api_process_count _api_process_rank"
        ),
    ),
    Owner("vllm.config.utils:SupportsHash", read="compute_hash"),
    Owner("vllm.platforms.interface:Platform", read="_enum _align_hybrid_block_size"),
    Owner(
        "vllm.v1.core.single_type_kv_cache_manager:MambaManager",
        read="_num_retired_blocks has_prefill_checkpoint_blocks",
    ),
    Owner("vllm.v1.metrics.prometheus", read="get_prometheus_registry"),
    Owner("vllm.entrypoints.serve.instrumentator.metrics", read="PrometheusResponse"),
)

OWNERS = (*_API, *_ENGINE, *_WORKER, *_ATTENTION, *_CPU, *_CUDA)
