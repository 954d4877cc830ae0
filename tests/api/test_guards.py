"""Every row of the table of refusals is triggered once, and nothing else with it."""

import re
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from support.engine_configs import Overlay
from vllm_kvpolicy import compat
from vllm_kvpolicy.api import engine_config
from vllm_kvpolicy.api.guards import REFUSALS, refusals
from vllm_kvpolicy.api.request_guards import check_prepared
from vllm_kvpolicy.config import KVPolicyConfig


def named(start):
    """Return the name of the one row that a pattern finds."""
    (name,) = [row.name for row in REFUSALS if re.search(start, row.name)]
    return name


def policy(name, **values):
    """What switches a policy on."""
    return {"additional_config": {"kv_policy": {"policy": name, **values}}}


OTHER_DRAFTS = named("draft models")
EXECUTORS = named("executors other")
DRAFTER_BESIDE = named("MTP and EAGLE with other")
DRAFTER_ON_GPU = named("MTP and EAGLE on GPUs")
MEASURED_STATES = named("each token .*beside layers with a state")
NGRAM = SimpleNamespace(method="ngram")
DRAFTER_BESIDE_WINDOWS = named("MTP and EAGLE with sliding")
LAYER_TYPES = "model_config.hf_text_config.layer_types"
WINDOW = {"model_config.hf_text_config.sliding_window": 48}
EXPECTED = policy("ams-expected")
ROPE_PARAMETERS = "model_config.hf_text_config.rope_parameters"
SINK_WEIGHING = named(r"learned sinks \(g")
GPT_OSS = {"model_config.hf_text_config.model_type": "gpt_oss"}
ALIBI = named("ALiBi")
UNLIKE = "layers that differ in heads or head sizes"
OTHER_WINDOWS = named("several sizes")
OWN = "attention layers of a model's own"
VALUES = named("values of another size")
HEADS_OF_WINDOWS = {"swa_num_key_value_heads": 4, "swa_head_dim": 32}
HEADS_OF_WINDOWS |= {"v_head_dim": 32, "swa_v_head_dim": 32}
SET = object()  # some configuration object, whatever is in it
FULL, SLIDING = "full_attention", "sliding_attention"
DRAFTS = {"speculative_config": NGRAM}
RAGGED = policy("adakv-snapkv")
FILE = policy("qfilter", policy_config={"qfilter_calibration": "a file"})


def part(name):
    """Return a function of fields of a part of a VllmConfig, which returns changes."""
    return lambda **fields: {f"{name}.{field}": fields[field] for field in fields}


model, cache, attention, parallel = map(
    part, ("model_config", "cache_config", "attention_config", "parallel_config")
)
FP8 = cache(cache_dtype="fp8")
TWO = parallel(tensor_parallel_size=2, world_size=2)


def layers(*kinds):
    return WINDOW | {LAYER_TYPES: list(kinds)}


def drafter(method="eagle3", head_size=32, max_model_len=4096, kind=FULL, **fields):
    """Layers that draft, with the tiny model's heads."""
    shape = SimpleNamespace(
        total_num_attention_heads=4, total_num_kv_heads=2, head_size=head_size
    )
    values = {
        "method": method,
        "parallel_drafting": False,
        "disable_padded_drafter_batch": False,
        "draft_model_config": SimpleNamespace(
            model_arch_config=shape,
            max_model_len=max_model_len,
            hf_text_config=SimpleNamespace(layer_types=[kind], sliding_window=48),
        ),
        "use_multi_module_mtp": lambda: False,
        **fields,
    }
    return {"speculative_config": SimpleNamespace(**values)}


def text(**values):
    """What a model's own configuration says, in place of the tiny model's."""
    values = {"layer_types": None, "sliding_window": None, "head_dim": 32, **values}
    return {"model_config.hf_text_config": SimpleNamespace(**values)}


def mimo_v2(cached=48, **values):
    """What vLLM makes of a MiMo-V2, which has other names for kinds of layers.

    Args:
        cached: the window of every layer until the model is made, as vLLM believes.
    """
    fields = {"model_type": "mimo_v2", "hybrid_layer_pattern": [0, 1, 1]}
    fields |= {"sliding_window": 48, "sliding_window_size": 48, **HEADS_OF_WINDOWS}
    return text(**{**fields, **values}) | cache(sliding_window=cached)


def latent(**fields):
    """A model with latent vectors."""
    values = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, **fields}
    return model(use_mla=True) | text(**values)


LATENT = latent()
OTHER_LATENTS = named("multi-head latent attention on the Transformers")
LATENT_HEADS = named("multi-head latent attention .MLA. with what reads")
SPARSE_LATENTS = named("multi-head latent attention with sparse")
LATENT_BESIDE = named("multi-head latent attention with FP8")
MIXED = layers(SLIDING, FULL)
CHUNKED = ["chunked_attention", FULL]
STATES = {LAYER_TYPES: ["linear_attention", FULL]}
HYBRID = STATES | {"model_config.is_hybrid": True}
EVENTS = SimpleNamespace(enable_kv_cache_events=True)
FLEX = SimpleNamespace(name="FLEX_ATTENTION")
FLASHINFER = SimpleNamespace(name="FLASHINFER")
FLASH, TRITON = (SimpleNamespace(name=f"{name}_ATTN") for name in ("FLASH", "TRITON"))


# Row -> what switches the feature on in a finished VllmConfig.
TRIGGERS = {
    "custom worker classes": parallel(worker_cls="mine.Worker"),
    "custom scheduler classes": {"scheduler_config.scheduler_cls": "mine.Sched"},
    "unchunked prefill": {"scheduler_config.enable_chunked_prefill": False},
    "block sizes that the attention kernel cannot split": cache(block_size=48),
    "other attention backends": attention(backend=FLEX),
    named("FlashInfer with per"): attention(backend=FLASHINFER) | RAGGED,
    named("attention fused"): {"compilation_config.pass_config.fuse_attn_quant": True}
    | RAGGED,
    # The tiny model has two.
    "`quest` on more ranks than KV heads": (
        parallel(tensor_parallel_size=4) | policy("snapkv+quest")
    ),
    "pipeline parallelism": parallel(pipeline_parallel_size=2),
    "data parallelism of mixture-of-experts models": (
        parallel(data_parallel_size=2) | model(is_moe=True)
    ),
    "data parallelism over Ray": parallel(data_parallel_backend="ray"),
    "decode context parallelism": parallel(decode_context_parallel_size=2),
    "prefill context parallelism": parallel(prefill_context_parallel_size=2),
    EXECUTORS: parallel(distributed_executor_backend="ray"),
    "dual batch overlap": parallel(enable_dbo=True),
    "microbatches": parallel(ubatch_size=2),
    "elastic expert parallelism": parallel(enable_elastic_ep=True),
    "fault tolerance": parallel(enable_fault_tolerance=True),
    OTHER_DRAFTS: {"speculative_config": SimpleNamespace(method="medusa")},
    DRAFTER_ON_GPU: drafter() | {"use_v2_model_runner": True},
    DRAFTER_BESIDE: drafter() | FP8,
    named("speculative decoding with what measures"): DRAFTS
    | policy("tova", allow=["ams-epikv"]),
    named("LoRA adapters with a p"): {"lora_config": SET} | FILE,
    "sliding windows in every layer": layers(SLIDING),
    "sliding-window layers without the hybrid KV cache manager": {
        **MIXED,
        "scheduler_config.disable_hybrid_kv_cache_manager": True,
    },
    "full attention in several KV cache groups": layers(*[FULL] * 3, *[SLIDING] * 2),
    named("quest.* with sliding"): MIXED | policy("tova+quest"),
    named("sliding window or a state, with a policy"): MIXED | FILE,
    named("speculative decoding with layers"): HYBRID | DRAFTS,
    DRAFTER_BESIDE_WINDOWS: MIXED | drafter(),
    "dual chunk attention": text(dual_chunk_attention_config={"chunk_size": 64}),
    named("Fourier"): EXPECTED | {ROPE_PARAMETERS: {"use_fope": True}},
    named("heads with a rotated"): EXPECTED | text(qk_rope_head_dim=16),
    named("the Transformers backend where"): {
        **EXPECTED,
        "model_config.using_transformers_backend": lambda: True,
        ROPE_PARAMETERS: {FULL: {"rope_type": "longrope"}},
    },
    SINK_WEIGHING: GPT_OSS | policy("tova", allow=["ams-rkv"]),
    "per-head lengths with learned sinks": GPT_OSS | RAGGED,
    "tensor parallelism with learned sinks": GPT_OSS | parallel(tensor_parallel_size=2),
    "LoRA adapters with learned sinks": {**GPT_OSS, "lora_config": SET},
    "weight transfer with learned sinks": {**GPT_OSS, "weight_transfer_config": SET},
    "FP8 KV caches with learned sinks": GPT_OSS | FP8,
    named("layers other than"): {LAYER_TYPES: CHUNKED},
    named("a state beside sliding windows"): model(is_hybrid=True),
    named("or without full attention"): STATES,
    named("FlashInfer with layers"): (HYBRID | attention(backend=FLASHINFER)),
    MEASURED_STATES: HYBRID | policy("tova", allow=["ams-epikv"]),
    named("without rotary positions"): EXPECTED | text(model_type="nemotron_h"),
    "keys of the prefix cache for less than a superblock": (
        HYBRID | cache(prefix_match_unit=16)
    ),
    OWN: model(architectures=["InklingForCausalLM"]),
    VALUES: mimo_v2(v_head_dim=16),
    UNLIKE: mimo_v2(swa_num_key_value_heads=3),
    OTHER_WINDOWS: text(interleaved_sliding_window=[48, None]),
    ALIBI: model(architectures=["BloomForCausalLM"]),
    named("soft caps"): text(attn_logit_softcapping=50.0),
    "learned sinks of other models than gpt-oss": text(
        model_type="granite_swa", layer_types=[FULL]
    ),
    "attention-free models": model(is_attention_free=True),
    LATENT_HEADS: LATENT | policy("tova", allow=["ams-expected"]),
    SPARSE_LATENTS: latent(index_topk=2048),
    OTHER_LATENTS: latent(kv_lora_rank=256),
    "multi-head latent attention beside layers with a state": latent(
        layer_types=["linear_attention", FULL]
    )
    | model(is_hybrid=True),
    LATENT_BESIDE: LATENT | FP8,
    "hierarchical sparse attention (HiSparse)": attention(hisparse_config=SET),
    "non-causal attention": attention(use_non_causal=True),
    named("KV sharing between layers"): text(num_kv_shared_layers=2)
    | model(using_transformers_backend=lambda: True),
    "prefill without the layers that share keys and values": cache(
        kv_sharing_fast_prefill=True
    ),
    "KV caches of other dtypes than the model's and FP8": cache(cache_dtype="nvfp4"),
    "KV connectors and KV offloading": cache(kv_offloading_size=1.0),
    "encoder-cache connectors": {"ec_transfer_config": SET},
    "KV cache events": {"kv_events_config": EVENTS},
    "routed experts in answers": {"aux_output_config.enabled": True},
    "cascade attention": model(disable_cascade_attn=False),
    "pooling models": model(runner_type="pooling"),
    "encoder-decoder models": model(is_encoder_decoder=True),
    "prefix-LM attention": model(is_mm_prefix_lm=True),
    "residual sliding-window attention (R-SWA)": model(rswa_window=512),
    "diffusion models": model(is_diffusion=True),
    "images, audio and video": model(supports_multimodal_inputs=True),
    named("multimodal"): model(is_multimodal_model=True) | FILE,
    "prompt embeddings": model(enable_prompt_embeds=True),
    named("weight transfer with a p"): {"weight_transfer_config": SET} | FILE,
    named("sleep mode with a p"): model(enable_sleep_mode=True) | FILE,
}
# Rows that depend on the installation -> what switches them on there.
MACHINE_TRIGGERS = {
    "other vLLM versions": lambda patch: patch.setattr(
        compat, "vllm_version", lambda: "0.34.0"
    ),
    "platforms other than CPU and CUDA": lambda patch: patch.setattr(
        compat, "platform_name", lambda: "rocm"
    ),
    "batch-invariant mode": lambda patch: patch.setenv("VLLM_BATCH_INVARIANT", "1"),
    "memory plans of earlier starts": lambda patch: patch.setenv(
        "VLLM_ENABLE_STARTUP_PLAN", "1"
    ),
    "the Rust front end": lambda patch: patch.setenv("VLLM_USE_RUST_FRONTEND", "1"),
}
# Take a machine and a flag, and some a model.
FP8_ON_FLASH = "FP8 KV caches on GPUs with other attention than Triton's"
E5M2_ON_GPU = "FP8 KV caches of E5M2 on GPUs"
FP8_ON_CPU = "FP8 KV caches on CPUs without AVX-512"
FP8_BEFORE = "FP8 KV caches on GPUs before compute capability 8.9"
BY_DEVICE = (FP8_ON_FLASH, FP8_BEFORE, E5M2_ON_GPU, FP8_ON_CPU)
OTHER_SETTING = {"attention_type": SLIDING, "num_attention_groups": 8}
GROUPS = [SimpleNamespace(n_heads_in_group=count) for count in (4, 8)]
BLOCKS = [SimpleNamespace(attention=group) for group in GROUPS]
KINDS = [SLIDING, FULL]
# Further ways to switch a feature on.
MORE_TRIGGERS = [
    (
        "keys of the prefix cache for less than a superblock",
        MIXED | cache(prefix_match_unit=16),
    ),
    ("sliding windows in every layer", cache(sliding_window=512)),
    ("KV connectors and KV offloading", {"kv_transfer_config": SET}),
    ("diffusion models", {"diffusion_config": SET}),
    (MEASURED_STATES, text(altup_num_inputs=4) | policy("epikv")),
    (DRAFTER_BESIDE_WINDOWS, drafter(kind=SLIDING)),
    (DRAFTER_BESIDE, drafter(parallel_drafting=True)),
    (DRAFTER_BESIDE, drafter(disable_padded_drafter_batch=True)),
    (DRAFTER_BESIDE, drafter(head_size=64)),
    (DRAFTER_BESIDE, drafter(use_multi_module_mtp=lambda: True)),
    (DRAFTER_BESIDE, drafter(max_model_len=2048) | RAGGED),
    *(
        (DRAFTER_BESIDE, drafter() | changes)
        for changes in (
            policy("local"),
            policy("snapkv+quest"),
            FILE,
            {"lora_config": SET},
            parallel(tensor_parallel_size=2),
        )
    ),
    (EXECUTORS, parallel(distributed_executor_backend="external_launcher") | TWO),
    (LATENT_HEADS, LATENT | RAGGED),
    (LATENT_HEADS, LATENT | policy("identity", policy_config={"ragged": True})),
    (SPARSE_LATENTS, latent(compress_ratios=[1, 4])),
    (OTHER_LATENTS, LATENT | model(using_transformers_backend=lambda: True)),
    (OTHER_LATENTS, text(kv_lora_rank=512, model_type="sarvam_mla")),
    (LATENT_BESIDE, LATENT | {"lora_config": SET}),
    (LATENT_BESIDE, LATENT | drafter()),
    ("other attention backends", LATENT | attention(backend=TRITON)),
    (OWN, model(architectures=["MiniMaxM3SparseForCausalLM"])),
    (VALUES, mimo_v2(swa_v_head_dim=16)),
    (OTHER_WINDOWS, mimo_v2(sliding_window_size=64)),
    (OTHER_WINDOWS, mimo_v2(sliding_window=None, cached=None)),
    (OWN, text(model_type="pangu_pro_moe_v2", param_sink_number=4)),
    (UNLIKE, text(num_attention_groups=4, attention_other_setting=OTHER_SETTING)),
    (UNLIKE, text(layer_types=[FULL] * 2, num_attention_heads_per_layer=[8, 4])),
    (UNLIKE, text(block_configs=BLOCKS)),
    (OTHER_WINDOWS, text(sliding_windows=[48, 96])),
    (OTHER_WINDOWS, text(model_type="cohere2", sliding_window=48, layer_types=KINDS)),
    (ALIBI, text(model_type="falcon", alibi=True)),
    ("other attention backends", attention(backend_per_kind={FULL: FLEX})),
]


def expected(name):
    (row,) = [row for row in REFUSALS if row.name == name]
    return [f"{row.name}: {row.change}"]


@pytest.fixture(autouse=True)
def cpu_with_avx512(monkeypatch):
    """Whatever this CPU has: FP8 caches are refused without, as a test of its own."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)


def test_every_row_has_its_trigger():
    names = [row.name for row in REFUSALS]
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted([*TRIGGERS, *MACHINE_TRIGGERS, *BY_DEVICE])
    assert {row.name for row in REFUSALS if row.by_machine} == set(MACHINE_TRIGGERS)


def test_a_plain_server_is_not_refused(policy_config):
    assert refusals(policy_config) == []
    launched = parallel(distributed_executor_backend="external_launcher")
    assert refusals(Overlay(policy_config, launched)) == []  # as TRL starts it


@pytest.mark.parametrize(
    ("name", "changes"),
    [*TRIGGERS.items(), *MORE_TRIGGERS],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_feature_is_refused_by_its_own_row(policy_config, name, changes):
    assert refusals(Overlay(policy_config, changes)) == expected(name)


@pytest.mark.parametrize("name", MACHINE_TRIGGERS)
def test_each_machine_is_refused_by_its_own_row(policy_config, monkeypatch, name):
    MACHINE_TRIGGERS[name](monkeypatch)
    assert refusals(policy_config) == expected(name)


@pytest.mark.parametrize(
    ("name", "changes", "capability"),
    [
        (FP8_ON_FLASH, cache(cache_dtype="fp8"), (9, 0)),
        (FP8_ON_FLASH, cache(cache_dtype="fp8_e4m3") | attention(backend=FLASH), None),
        (FP8_BEFORE, cache(cache_dtype="fp8") | attention(backend=TRITON), (8, 6)),
        (E5M2_ON_GPU, cache(cache_dtype="fp8_e5m2") | attention(backend=TRITON), None),
        (DRAFTER_ON_GPU, drafter("mtp"), (9, 0)),
    ],
)
def test_what_only_a_cpu_serves_is_refused_on_gpus(
    policy_config, monkeypatch, name, changes, capability
):
    monkeypatch.setattr(compat, "gpu_capability", lambda: capability)
    config = Overlay(policy_config, changes)
    assert refusals(config) == []
    monkeypatch.setattr(compat, "platform_name", lambda: "cuda")
    assert refusals(config) == expected(name)
    assert refusals(policy_config) == []


@pytest.mark.parametrize(
    ("dtype", "is_refused"),
    [
        *[("auto", False), ("bfloat16", False), ("float16", True), ("fp8", False)],
        *[("fp8_e4m3", False), ("fp8_e5m2", False), ("fp8_per_token_head", True)],
        *[("nvfp4", True), ("turboquant_4bit_nc", True), ("int8_per_token_head", True)],
    ],
)
def test_a_cache_dtype_may_be_the_models_own_or_fp8(policy_config, dtype, is_refused):
    changes = model(dtype=torch.bfloat16) | cache(cache_dtype=dtype)
    assert bool(refusals(Overlay(policy_config, changes))) == is_refused


@pytest.mark.parametrize("dtype", compat.FLOAT8_CACHES)
@pytest.mark.parametrize("has_amx", [False, True])
def test_an_fp8_cache_needs_avx512_or_amx(policy_config, monkeypatch, dtype, has_amx):
    """As vLLM says itself, but after it has loaded the weights."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    config = Overlay(policy_config, cache(cache_dtype=dtype))
    assert refusals(policy_config) == []
    if has_amx:
        assert refusals(config) == []
        assert _get_attn_isa(torch.float32, 32, 64, dtype) == "vec"
    else:
        assert refusals(config) == expected(FP8_ON_CPU)
        with pytest.raises(NotImplementedError, match="requires x86 with AVX-512"):
            _get_attn_isa(torch.float32, 32, 64, dtype)


@pytest.mark.parametrize(
    ("method", "is_refused"),
    [
        *[("ngram", False), ("suffix", False), ("ngram_gpu", True), ("mtp", False)],
        *[("eagle", False), ("eagle3", False), ("medusa", True), ("draft_model", True)],
    ],
)
def test_drafts_come_from_tokens_or_from_layers(policy_config, method, is_refused):
    found = refusals(Overlay(policy_config, drafter(method)))
    assert found == (expected(OTHER_DRAFTS) if is_refused else [])


@pytest.mark.parametrize(
    "changes",
    [
        mimo_v2(),
        text(
            layer_types=[SLIDING, FULL, SLIDING],
            sliding_window=48,
            num_attention_heads=4,
            num_attention_heads_per_layer=[8, 4, 8],
        ),
        text(model_type="granite_swa", layer_types=[FULL], attention_sinks=False),
        text(model_type="cohere2", layer_types=[FULL] * 2),
        # One group of full attention.
        layers(FULL, *[SLIDING] * 5),
        layers(*[FULL] * 4, *[SLIDING] * 3),
        parallel(data_parallel_size=2),  # of a dense model
        model(is_moe=True),
        GPT_OSS | policy("h2o"),
        # `--disable-sliding-window`
        text(layer_types=KINDS),
        text(layer_types=[SLIDING] * 2),
    ],
)
def test_what_is_like_a_refused_feature_is_served(policy_config, changes):
    assert refusals(Overlay(policy_config, changes)) == []


def test_supported_versions():
    for version in ("0.32.0", "0.32.4+cpu", "0.33.0", "0.33.0.post1+cu129"):
        assert compat.supports(version), version
    for version in ("0.33.0rc1", "0.33.1.dev42+g0123abc", "0.34.0", "0.3.2"):
        assert not compat.supports(version), version


def test_a_release_that_was_never_run_is_told(monkeypatch, policy_log):
    engine_config._tell_evidence()
    assert policy_log.messages == []
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.33.1")
    engine_config._tell_evidence()
    (told,) = policy_log.messages
    assert told.startswith("KV policy: vLLM 0.33.1 was never run as")


def request(prompt_tokens=10, max_tokens=20, resumable=False, **extra_args):
    return SimpleNamespace(
        resumable=resumable,
        prompt_token_ids=[0] * prompt_tokens,
        sampling_params=SimpleNamespace(max_tokens=max_tokens, extra_args=extra_args),
    )


PINNING = KVPolicyConfig("tova", 128, 64, prefill_interval_tokens=64, pin="prompt")


PLAIN = KVPolicyConfig("tova", 128, 64)


@pytest.fixture
def small_pool(policy_config):
    return Overlay(policy_config, cache(num_gpu_blocks=9, block_size=32))


def check(request, vllm_config, server=PLAIN):
    """Check a request as vLLM's InputProcessor does once it is prepared."""
    policy = {"additional_config": {"kv_policy": server.to_dict()}}
    processor = SimpleNamespace(vllm_config=Overlay(vllm_config, policy))
    return check_prepared(processor, request, request.sampling_params)


def test_good_requests_pass(small_pool):
    assert check(request(), small_pool) is None
    assert check(request(kv_budget=96), small_pool) is None
    assert check(request(56, 200, kv_policy="none"), small_pool) is None
    assert check(request(100), small_pool, PINNING) is None


@pytest.mark.parametrize(
    ("config", "asked", "message"),
    [
        (
            PLAIN,
            request(57, 200, kv_policy="none"),
            r"up to 9 superblocks .* at most 8, the size of the pool; lower max_tokens "
            "or leave out kv_policy 'none'$",
        ),
        (
            PINNING,
            request(200, 120),
            "^kv_pin: got 'prompt', asked for or by default, expected 'none': pinned "
            "tokens stay, and so this request needs up to 10 superblocks .* of 8 in ",
        ),
        (
            KVPolicyConfig("tova", 64, 64, prefill_interval_tokens=64, pin="prompt"),
            request(200, 120),
            "^kv_pin: got 'prompt', .* expected 'none' or at most 64 tokens",
        ),
        (
            KVPolicyConfig("tova", 512, 64, pin="prompt"),
            request(300, 120),
            "^kv_policy: .* lower max_tokens or kv_budget, or start the server with",
        ),
        (
            PLAIN,
            request(300, 20),
            "lower max_tokens or kv_budget, .* prefill_interval below 4096$",
        ),
        (
            KVPolicyConfig("quest", interval_tokens=64),
            request(200, 120),
            "shorten the prompt: this policy keeps every token$",
        ),
        (
            KVPolicyConfig("tova", 128, 64, allow=("quest",)),
            request(200, 120, kv_policy="quest", kv_pin="prompt"),
            "^kv_policy: with 'quest' .* this policy keeps every token$",
        ),
    ],
    ids=[
        *("full cache", "pinned prompt", "pins that fit", "too long without pins"),
        *("prompt read whole", "selection", "pinned selection"),
    ],
)
def test_what_is_larger_than_the_pool_is_refused_with_advice(
    small_pool, config, asked, message
):
    with pytest.raises(ValueError, match=message):
        check(asked, small_pool, config)


def test_bad_knobs_and_resumable_sessions_are_refused(small_pool):
    with pytest.raises(ValueError, match="kv_budget: got 500"):
        check(request(kv_budget=500), small_pool)
    with pytest.raises(ValueError, match="resumable"):
        check(request(resumable=True), small_pool)
