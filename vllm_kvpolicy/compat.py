"""What depends on vLLM's version, platform and environment, in one place."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Release:
    """A minor release of vLLM that policies start with.

    Args:
        evidence: what has been done with it, for the documentation.
        changed: "module:path" of a row of `api.patch_table`, or of `relied_on` in
            `tools/vllm_surface` -> its declaration, or the names of a class's abstract
            methods, in the form of those tables, where it is not that of the tested
            release.
    """

    evidence: str
    changed: Mapping[str, str] = field(default_factory=dict)


TESTED_VLLM = "0.32"
RELEASES = {
    TESTED_VLLM: Release("every test runs with it"),
    "0.33": Release(
        "never run as released, because it has no wheel for the CPU; what we rely on "
        "was compared with its CUDA wheel (`python -m tools.vllm_surface`)",
        {
            "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
            "._generate_with_builtin_tools": (
                "async self request_id engine_input sampling_params context "
                "tok_params lora_request priority trace_headers session_id "
                "data_parallel_rank reasoning_parser_kwargs reasoning_ended "
                "max_tool_calls"
            ),
            "vllm.v1.attention.backends.mla.cpu_mla:CPUMLAImpl.do_kv_cache_update": (
                "self kv_c_normed k_pe kv_cache slot_mapping kv_cache_dtype k_scale "
                "skip_scale"
            ),
            "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": (
                "self request max_cache_hit_length"
            ),
            "vllm.v1.outputs:AsyncModelRunnerOutput": (
                "get_output get_kv_connector_output"
            ),
        },
    ),
}
SUPPORTED_VLLM = " or ".join(f"{minor}.x" for minor in RELEASES)
# Releases, also of a local build; "rc1", "a2" and ".dev3" are none.
FINAL = re.compile(r"\d+(\.\d+)*(\.post\d+)?(\+.*)?")
# Names the implementation that every operation of `kernels` must run on a GPU.
KERNELS_VARIABLE = "KVPOLICY_KERNELS"
# With 1, a command that fails shows the whole traceback in place of a line.
TRACEBACK_VARIABLE = "KVPOLICY_TRACEBACK"
# Classes that vLLM picks by platform, and the ones that take their place.
WORKER_CLASSES = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_kvpolicy.worker.cpu.KVPolicyCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_kvpolicy.worker.gpu.KVPolicyGPUWorker",
}
# Keyed by `SchedulerConfig.async_scheduling`.
SCHEDULER_CLASSES = {
    False: "vllm_kvpolicy.block_manager.scheduler.KVPolicyScheduler",
    True: "vllm_kvpolicy.block_manager.scheduler.KVPolicyAsyncScheduler",
}
# For servers without a policy whose requests are counted; keyed in the same way.
COUNTING_CLASSES = {
    False: "vllm_kvpolicy.block_manager.counting.CountingScheduler",
    True: "vllm_kvpolicy.block_manager.counting.CountingAsyncScheduler",
}
# PyTorch's names of the numbers that vLLM's FP8 KV caches hold, by --kv-cache-dtype.
FLOAT8_CACHES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
# Types of models in which every layer of full attention has learned sinks.
LEARNED_SINKS = ("gpt_oss",)
# Types of models that have them where layers have kinds, unless they say otherwise.
UNTESTED_SINKS = ("granite", "granite_swa", "granitemoe", "granitemoe_swa")
# Architectures whose layers attend by classes of their own, or twice in a layer.
OWN_ATTENTION = (
    "HrmTextForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "IQuestLoopCoderForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
)
# Architectures that add biases by distance in every layer; Falcon's are an option.
ALIBI = ("BloomForCausalLM", "Step1ForCausalLM")
# Types of models that have no module which rotates queries and keys.
UNROTATED = ("jamba", "nemotron_h")
# Types of models whose windows vLLM makes a token wider than `sliding_window`.
WIDER_WINDOWS = ("cohere2", "cohere2_moe")
# Names of vLLM's backends for which there is a subclass of ours.
ATTENTION_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
# Of GPUs, with what takes their place. A machine may lack the library of one of them.
GPU_BACKENDS = {
    "FLASH_ATTN": "vllm_kvpolicy.worker.backends.flash.KVPolicyFlashBackend",
    "TRITON_ATTN": "vllm_kvpolicy.worker.backends.triton.KVPolicyTritonBackend",
    "FLASHINFER": "vllm_kvpolicy.worker.backends.flashinfer.KVPolicyFlashInferBackend",
}
# Types of models with latent vectors that vLLM expands and caches as keys and values.
EXPANDED = ("minicpm3",)
# Of latent vectors (MLA), with what takes their place.
LATENT_BACKENDS = {
    "CPU_MLA": "vllm_kvpolicy.worker.backends.latent.KVPolicyCPUMLABackend",
    "TRITON_MLA": "vllm_kvpolicy.worker.backends.latent.KVPolicyTritonMLABackend",
}
# Tokens per superblock: the default, and what a block size must be a multiple of. The
# CPU kernel packs keys by 32; the Triton kernel wants 16.
BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
# And of latent vectors, everywhere.
LATENT_TOKENS = 16


def cache_folder() -> Path:
    """Return the folder of what is kept of this user from one start to the next."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "vllm-kvpolicy"


def missing_vllm() -> str | None:
    """Return what to install where there is no vLLM, which no wheel of ours brings."""
    if find_spec("vllm") is not None:
        return None
    return (
        f"this needs vLLM {SUPPORTED_VLLM}, which is not installed: pip install "
        f"vllm=={TESTED_VLLM}.0 with CUDA; without, `make setup` in a checkout of "
        "vllm-kvpolicy, or its CPU image"
    )


def wants_traceback() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE) == "1"


def vllm_version() -> str:
    import vllm

    return vllm.__version__


def supports(version: str) -> bool:
    """Tell whether policies start with vLLM `version`: only releases were compared."""
    return minor_release(version) in RELEASES and bool(FINAL.fullmatch(version))


def release_of(version: str) -> Release:
    """Return the row of a version of vLLM, the newest one for a version without."""
    return RELEASES.get(minor_release(version), [*RELEASES.values()][-1])


def minor_release(version: str) -> str:
    """Return "0.33" for "0.33.1+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def package_version(distribution: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def platform_name() -> str:
    """Return vLLM's name of the platform: "cpu", "cuda", "rocm", ..."""
    from vllm.platforms import current_platform

    return current_platform._enum.name.lower()


def reads_float8() -> bool:
    """Return whether vLLM's attention for CPUs reads an FP8 cache on this one."""
    import torch

    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this CPU.

    Where it does not, vLLM leaves such products to PyTorch. Of several rows they take
    several times as long there as those of float32 in oneDNN.
    """
    import torch

    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def gpu_capability() -> tuple[int, int] | None:
    """Return this machine's compute capability, such as (9, 0); None without a GPU."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return None if found is None else (found.major, found.minor)


def device_memory() -> int:
    """Return the bytes of this machine's device, whoever uses them."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def device_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def align_states(vllm_config: Any) -> None:
    """Choose N of a model with states as vLLM does once its weights are loaded.

    A superblock has room for the state of a layer, so N depends on the state's size.
    That is asked of the model's class, which on a GPU may start CUDA where it is
    imported, and so in another process.
    """
    from vllm.model_executor.models.registry import _run_in_subprocess
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = vllm_config.model_config
    if model is None or not model.is_hybrid:
        return
    kinds = AttentionBackendEnum
    default = kinds.CPU_ATTN if platform_name() == "cpu" else kinds.TRITON_ATTN
    backend = vllm_config.attention_config.backend or default
    fields = "block_size", "mamba_block_size", "mamba_page_size_padded"

    def aligned() -> list[int | None]:
        current_platform._align_hybrid_block_size(vllm_config, backend.get_class())
        return [getattr(vllm_config.cache_config, name) for name in fields]

    found = aligned() if platform_name() == "cpu" else _run_in_subprocess(aligned)
    for name, value in zip(fields, found, strict=True):
        setattr(vllm_config.cache_config, name, value)


def caches_latents(model: Mapping[str, Any]) -> bool:
    """Return whether vLLM will cache latent vectors (MLA) of a model.

    Args:
        model: its config.json.
    """
    text = model.get("text_config") or model.get("language_config") or model
    is_off = environment_flag("VLLM_MLA_DISABLE")
    is_expanded = is_off or text.get("model_type") in EXPANDED
    return bool(text.get("kv_lora_rank")) and not is_expanded


def block_tokens(model_config: Any) -> int:
    """Return our default of N, of which others must be multiples."""
    is_latent = model_config.use_mla
    return LATENT_TOKENS if is_latent else BLOCK_TOKENS.get(platform_name(), 16)


def serve_latents(vllm_config: Any, engine_args: Any) -> None:
    """Have a CPU serve latent vectors (MLA) by vLLM's attention for any CPU, in chunks.

    vLLM takes another one where there is AMX, and with this one it cuts no prompts,
    though that attends to what is cached before a chunk. Events need chunks. Rotations
    are PyTorch's, unless the user asks for vLLM's kernel: it turns such queries by
    wrong positions.

    Args:
        engine_args: EngineArgs, of which vLLM has made `vllm_config`; that is changed.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = vllm_config.model_config
    if model is None or not model.use_mla or platform_name() != "cpu":
        return
    attention, cache = vllm_config.attention_config, vllm_config.cache_config
    attention.backend = attention.backend or AttentionBackendEnum.CPU_MLA
    if attention.backend == AttentionBackendEnum.CPU_MLA:
        cache.block_size, cache.enable_prefix_caching = LATENT_TOKENS, False
        is_chunked = engine_args.enable_chunked_prefill is not False
        vllm_config.scheduler_config.enable_chunked_prefill = is_chunked
        tokens = engine_args.max_num_batched_tokens  # else those of the longest prompt
        vllm_config.scheduler_config.max_num_batched_tokens = tokens
        operations = vllm_config.compilation_config.custom_ops
        if not {f"{sign}rotary_embedding" for sign in "+-"} & {*operations}:
            operations.append("-rotary_embedding")


def cuda_attention_backend(
    model: Mapping[str, Any], dtype: str, cache_dtype: str
) -> str:
    """Return the name of the backend to use on this machine's NVIDIA GPU.

    FlashAttention 2 and 3, which are for compute capabilities 8 and 9 and for 16-bit
    numbers, where vLLM has them; else Triton. Of these it alone reads FP8 caches with
    queries that are not FP8 and heads of more than 256 channels (Gemma 4), and
    FlashAttention 2 knows no learned sinks.

    Args:
        model: its config.json.
        dtype, cache_dtype: as on the command line.
    """
    major = (gpu_capability() or (0, 0))[0]
    text = model.get("text_config") or model
    sizes = (text.get(name) or 0 for name in ("head_dim", "global_head_dim"))
    has_sinks = text.get("add_swa_attention_sink_bias")  # MiMo-V2, beside windows
    has_sinks = has_sinks or model.get("model_type") in LEARNED_SINKS
    without_flash = (
        major not in (8, 9),
        cache_dtype in FLOAT8_CACHES,
        max(sizes) > 256,
        dtype in ("float", "float32"),
        major == 8 and has_sinks,
    )
    if caches_latents(model):
        return "TRITON_MLA"
    if any(without_flash):
        return "TRITON_ATTN"
    try:
        import_module("vllm.v1.attention.backends.flash_attn")
    except ImportError:
        return "TRITON_ATTN"
    return "FLASH_ATTN"


def is_first_process(engine_args: Any) -> bool:
    """Return whether a server makes its first VllmConfig from these arguments.

    Of several API servers each makes its own, after the process that starts them.
    """
    return engine_args._api_process_count == 1 or engine_args._api_process_rank < 0


def policy_variables() -> dict[str, str]:
    return {k: text for k, text in os.environ.items() if k.startswith("VLLM_KV_")}


def known_variables() -> dict[str, Any]:
    """Return the environment variables that vLLM knows, by name; its own dict."""
    from vllm import envs

    return envs.environment_variables


def environment_flag(name: str) -> bool:
    """Return one of vLLM's own switches, such as "VLLM_BATCH_INVARIANT"."""
    from vllm import envs

    return bool(getattr(envs, name))


def api_key() -> str | None:
    return os.environ.get("VLLM_API_KEY")


def demanded_kernels() -> str | None:
    return os.environ.get(KERNELS_VARIABLE) or None


def multiply_float32_exactly() -> None:
    """Have Triton multiply float32 as IEEE does from here on, not as TF32."""
    os.environ["TRITON_F32_DEFAULT"] = "ieee"


def forget_chosen_backends() -> None:
    """Make vLLM look up attention backends again.

    It remembers the class that it chose for an earlier engine of this process, which
    may have had no policy.
    """
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


def has_learned_sinks(vllm_config: Any) -> bool:
    model = vllm_config.model_config.hf_text_config
    return getattr(model, "model_type", None) in LEARNED_SINKS


def captures_attention(vllm_config: Any) -> bool:
    """Return whether the attention of a step may be the replay of a CUDA graph.

    Later in its start vLLM may still turn such graphs off, but never on.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    return bool(mode) and mode.has_full_cudagraphs()
