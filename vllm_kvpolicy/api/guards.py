"""Refuses what a policy is not tested with: one table of features."""

from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api.model_guards import MODEL_REFUSALS
from vllm_kvpolicy.api.patch_table import problems
from vllm_kvpolicy.api.refusal import (
    FITTED,
    Refusal,
    both,
    has_adapters,
    has_word_with,
    is_fitted,
    is_float8,
    is_on_gpu,
    is_ragged,
    listed,
    speculates,
    transfers_weights,
)
from vllm_kvpolicy.config import server_config
from vllm_kvpolicy.kernels import preferences
from vllm_kvpolicy.policies.names import SELECTIONS

# Methods of vLLM that draft from tokens alone, of the request and of earlier answers.
# Tests run both; those of suffix trees are skipped where the package `arctic-inference`
# is not installed. Others have layers of their own, whose keys and values no policy
# looks after.
DRAFTERS = ("ngram", "suffix")


def _block_is_odd(config: Any) -> bool:
    unit = compat.BLOCK_TOKENS.get(compat.platform_name(), 1)
    return config.cache_config.block_size % unit != 0


def _backends(config: Any) -> set[str]:
    """Return the attention backends that the user chose."""
    attention = config.attention_config
    chosen = [attention.backend, *attention.backend_per_kind.values()]
    return {backend.name for backend in chosen if backend is not None}


def _copies_select(config: Any) -> bool:
    server, ranks = server_config(config), config.parallel_config.tensor_parallel_size
    return (
        server is not None
        and any(each.info.selection is not None for each in server.all_resolved)
        and ranks > config.model_config.get_total_num_kv_heads()
    )


def _own_worker(config: Any) -> bool:
    known = {*compat.WORKER_CLASSES, *compat.WORKER_CLASSES.values()}
    return config.parallel_config.worker_cls not in known


def _own_scheduler(config: Any) -> bool:
    known = {None, *compat.SCHEDULER_CLASSES.values()}
    return config.scheduler_config.scheduler_cls not in known


_SELECTING = ", ".join(f"`{name}`" for name in SELECTIONS)


def _converts_cache(config: Any) -> bool:
    own = str(config.model_config.dtype).removeprefix("torch.")
    return config.cache_config.cache_dtype not in ("auto", own, *compat.FLOAT8_CACHES)


def _offloads_cache(config: Any) -> bool:
    return bool(config.kv_transfer_config or config.cache_config.kv_offloading_size)


REFUSALS = (
    Refusal(
        "other vLLM versions",
        lambda config: not compat.supports(compat.vllm_version()),
        f"install vLLM {compat.SUPPORTED_VLLM}",
        by_machine=True,
    ),
    Refusal(
        "platforms other than CPU and CUDA",
        lambda config: compat.platform_name() not in compat.BLOCK_TOKENS,
        "run on an x86 CPU or an NVIDIA GPU",
        by_machine=True,
    ),
    Refusal(
        "custom worker classes",
        _own_worker,
        "leave out --worker-cls",
    ),
    Refusal(
        "custom scheduler classes",
        _own_scheduler,
        "leave out --scheduler-cls",
    ),
    Refusal(
        "unchunked prefill",
        lambda config: not config.scheduler_config.enable_chunked_prefill,
        "leave out --no-enable-chunked-prefill",
    ),
    Refusal(
        "block sizes that the attention kernel cannot split",
        _block_is_odd,
        "set --block-size to a multiple of 32 on CPU or of 16 on CUDA, or leave it out",
    ),
    Refusal(
        "other attention backends",
        lambda config: not _backends(config) <= set(compat.ATTENTION_BACKENDS),
        f"leave out --attention-backend ({', '.join(compat.ATTENTION_BACKENDS)} work)",
    ),
    Refusal(
        f"FlashInfer with per-head lengths ({listed('ragged')})",
        both(lambda config: "FLASHINFER" in _backends(config), is_ragged),
        "leave out --attention-backend",
    ),
    Refusal(
        f"{_SELECTING} on more ranks than KV heads",
        _copies_select,
        "set --tensor-parallel-size to the model's KV heads or less: a page's score is "
        "over all query heads of a KV head",
    ),
    Refusal(
        "pipeline parallelism",
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
        "set --pipeline-parallel-size 1",
    ),
    Refusal(
        "data parallelism of mixture-of-experts models",
        lambda config: (
            config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe
        ),
        "set --data-parallel-size 1 and start one server per replica",
    ),
    Refusal(
        "data parallelism over Ray",
        lambda config: config.parallel_config.data_parallel_backend == "ray",
        "leave out --data-parallel-backend",
    ),
    Refusal(
        "decode context parallelism",
        lambda config: config.parallel_config.decode_context_parallel_size > 1,
        "set --decode-context-parallel-size 1",
    ),
    Refusal(
        "prefill context parallelism",
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
        "set --prefill-context-parallel-size 1",
    ),
    Refusal(
        "executors other than uni and mp",
        lambda config: (
            config.parallel_config.distributed_executor_backend
            not in (None, "mp", "uni")
        ),
        "leave out --distributed-executor-backend",
    ),
    Refusal(
        "dual batch overlap",
        lambda config: config.parallel_config.enable_dbo,
        "leave out --enable-dbo",
    ),
    Refusal(
        "microbatches",
        lambda config: config.parallel_config.ubatch_size > 1,
        "leave out --ubatch-size",
    ),
    Refusal(
        "elastic expert parallelism",
        lambda config: config.parallel_config.enable_elastic_ep,
        "leave out --enable-elastic-ep",
    ),
    Refusal(
        "fault tolerance",
        lambda config: config.parallel_config.enable_fault_tolerance,
        "leave out --enable-fault-tolerance",
    ),
    Refusal(
        "speculative decoding by other methods than n-grams and suffix trees (MTP, "
        "EAGLE, draft models and others)",
        both(
            speculates, lambda config: config.speculative_config.method not in DRAFTERS
        ),
        'set "method": "ngram" or "suffix" in --speculative-config, or leave it out',
    ),
    Refusal(
        "speculative decoding on GPUs",
        both(speculates, is_on_gpu),
        "leave out --speculative-config: no GPU has run a policy with drafts",
    ),
    Refusal(
        f"speculative decoding with what measures each token "
        f"({listed('measures_tokens')})",
        both(speculates, has_word_with("measures_tokens")),
        "leave out --speculative-config: a token is compared with the one before it, "
        "which may be a draft that is rejected",
    ),
    Refusal(
        f"LoRA adapters with a policy for the model's own weights ({FITTED})",
        both(has_adapters, is_fitted),
        "leave out --enable-lora, or merge the adapter into the model and make the "
        "policy's file for that",
    ),
    *MODEL_REFUSALS,
    Refusal(
        "KV caches of other dtypes than the model's and FP8",
        _converts_cache,
        f"set --kv-cache-dtype to {', '.join(compat.FLOAT8_CACHES)} or the model's own "
        "dtype, or leave it out",
    ),
    Refusal(
        "FP8 KV caches on GPUs",
        both(is_float8, is_on_gpu),
        "leave out --kv-cache-dtype, or name the model's own dtype where the "
        "checkpoint asks for FP8: no GPU has run a policy over one",
    ),
    Refusal(
        "FP8 KV caches on CPUs without AVX-512",
        both(
            is_float8,
            lambda config: not is_on_gpu(config) and not compat.reads_float8(),
        ),
        "leave out --kv-cache-dtype, or name the model's own dtype where the "
        "checkpoint asks for FP8: vLLM's attention reads FP8 with AVX-512 or AMX only",
    ),
    Refusal(
        "KV connectors and KV offloading",
        _offloads_cache,
        "leave out --kv-transfer-config and --kv-offloading-size",
    ),
    Refusal(
        "encoder-cache connectors",
        lambda config: config.ec_transfer_config is not None,
        "leave out --ec-transfer-config",
    ),
    Refusal(
        "KV cache events",
        lambda config: bool(
            config.kv_events_config and config.kv_events_config.enable_kv_cache_events
        ),
        "leave out --kv-events-config",
    ),
    Refusal(
        "routed experts in answers",
        lambda config: config.aux_output_config.enabled,
        "leave out --enable-return-routed-experts: vLLM stores the experts of as many "
        "tokens as the pool has room for, by the tokens alone; with a policy requests "
        "have more of them, and their experts depend on what was dropped",
    ),
    Refusal(
        "cascade attention",
        lambda config: not config.model_config.disable_cascade_attn,
        "leave out --no-disable-cascade-attn",
    ),
    Refusal(
        "prompt embeddings",
        lambda config: config.model_config.enable_prompt_embeds,
        "leave out --enable-prompt-embeds",
    ),
    Refusal(
        "sleep mode",
        lambda config: config.model_config.enable_sleep_mode,
        "leave out --enable-sleep-mode: vLLM sleeps on GPUs only, and none has slept "
        "with a policy; pausing and resuming work",
    ),
    Refusal(
        f"weight transfer with a policy for the model's own weights ({FITTED})",
        both(transfers_weights, is_fitted),
        "leave out --weight-transfer-config: the policy's file belongs to the weights "
        "that are replaced",
    ),
    Refusal(
        "batch-invariant mode",
        lambda config: compat.environment_flag("VLLM_BATCH_INVARIANT"),
        "unset VLLM_BATCH_INVARIANT",
        by_machine=True,
    ),
    Refusal(
        "memory plans of earlier starts",
        lambda config: compat.environment_flag("VLLM_ENABLE_STARTUP_PLAN"),
        "unset VLLM_ENABLE_STARTUP_PLAN: a plan does not know the policy",
        by_machine=True,
    ),
    Refusal(
        "the Rust front end",
        lambda config: compat.environment_flag("VLLM_USE_RUST_FRONTEND"),
        "unset VLLM_USE_RUST_FRONTEND: it does not check requests",
        by_machine=True,
    ),
)


def machine_refusals() -> list[str]:
    """Return what keeps any policy from running here, each with what to change."""
    rows = [row for row in REFUSALS if row.by_machine and row.applies(None)]
    reasons = [f"{row.name}: {row.change}" for row in rows]
    return reasons + preferences.unmet_demands(compat.platform_name()) + problems()


def refusals(vllm_config: Any) -> list[str]:
    """Return every reason why a policy cannot run, each with what to change.

    Args:
        vllm_config: the finished VllmConfig, before or after our classes are in it.
    """
    return [f"{row.name}: {row.change}" for row in REFUSALS if row.applies(vllm_config)]
