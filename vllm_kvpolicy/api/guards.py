"""Refuses what a policy is not tested with: one table of features.

Rows about models are of their attention layers, of how they rotate queries and keys,
and of learned sinks: logits that take part in every softmax, see `worker.layers`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api.patch_table import problems
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_values import server_config
from vllm_kvpolicy.kernels import preferences
from vllm_kvpolicy.policies.names import ADMISSIONS, ALLOCATORS, SCORERS, SELECTIONS
from vllm_kvpolicy.sizes import (
    FULL,
    SLIDING,
    STATE,
    has_other_values,
    kv_heads,
    layer_kinds,
    other_groups,
    own_shape,
    row_sizes,
    shapes,
)

Question = Callable[[Any], object]  # about a finished VllmConfig


@dataclass(frozen=True)
class Refusal:
    """One feature that does not go together with a policy yet.

    Args:
        feature: as a reader of vLLM's documentation knows it; an attribute in braces
            stands for the words of policies that have it.
        applies: tells from a finished VllmConfig whether the feature is on.
        by_machine: depends on the installation alone; `applies` ignores its argument.
    """

    feature: str
    applies: Question
    change: str
    by_machine: bool = False

    @cached_property
    def name(self) -> str:
        """The feature, with the words that it is about; imports all of them.

        A server imports no words but its own until it shows what it refuses.
        """
        return self.feature.format_map(_Lists())


class _Lists(dict[str, str]):
    """The words of this package that have an attribute, by its name."""

    def __missing__(self, attribute: str) -> str:
        """Return them as code, separated by commas."""
        words = {**SCORERS, **ALLOCATORS, **ADMISSIONS, **SELECTIONS}
        return ", ".join(
            f"`{word}`" for word in words if getattr(words[word], attribute)
        )


# -- questions that are made of names, and of other questions --------------------------


def all_of(*questions: Question) -> Question:
    return lambda config: all(question(config) for question in questions)


def any_of(*questions: Question) -> Question:
    return lambda config: any(question(config) for question in questions)


def of_policies(question: Callable[[KVPolicyConfig], object]) -> Question:
    """Return a question about the server's policies; no without any."""

    def ask(config: Any) -> bool:
        server = server_config(config)
        return server is not None and bool(question(server))

    return ask


def has_word_with(attribute: str) -> Question:
    return of_policies(lambda server: any(map(attrgetter(attribute), server.words)))


def has_part(name: str) -> Question:
    part = attrgetter(f"info.{name}")
    return of_policies(lambda server: any(map(part, server.all_resolved)))


def on(field: str) -> Question:
    return attrgetter(field)


def off(field: str) -> Question:
    return lambda config: not attrgetter(field)(config)


def several(name: str) -> Question:
    return lambda config: getattr(config.parallel_config, f"{name}_size") > 1


def speculates_by(method: str) -> Question:
    return lambda config: getattr(config.speculative_config, "method", None) == method


def given(field: str) -> Question:
    return lambda config: attrgetter(field)(config) is not None


def text_has(field: str) -> Question:
    return lambda config: _text(config, field)


def is_float8(config: Any) -> bool:
    return config.cache_config.cache_dtype in compat.FLOAT8_CACHES


def is_on_gpu(config: Any) -> bool:
    return compat.platform_name() != "cpu"


has_latents = on("model_config.use_mla")
is_fitted, reads_rotations = has_word_with("fitted"), has_word_with("rotates")
has_sinks = compat.has_learned_sinks
# Heads may keep different numbers of tokens.
is_ragged = of_policies(attrgetter("is_ragged"))
admits, selects = has_part("admission"), has_part("selection")
speculates = given("speculative_config")
has_adapters = given("lora_config")
transfers_weights = given("weight_transfer_config")
sleeps = on("model_config.enable_sleep_mode")


def has_other_executor(config: Any) -> bool:
    """Return whether the ranks run in ways that a policy is not served in.

    `external_launcher`, by which TRL starts them, is like `uni` where there is one.
    """
    parallel = config.parallel_config
    served = {None, "mp", "uni"}
    if parallel.world_size == 1:
        served.add("external_launcher")
    return parallel.distributed_executor_backend not in served


# Methods of vLLM that draft from tokens alone, of the request and of earlier answers.
# Tests run both; those of suffix trees are skipped where the package `arctic-inference`
# is not installed.
DRAFTERS = ("ngram", "suffix")
# And from layers of their own, whose keys and values are evicted with the model's.
LAYERED = ("eagle", "eagle3", "mtp")


def drafts_in_layers(config: Any) -> bool:
    return getattr(config.speculative_config, "method", None) in LAYERED


def _unlike_drafter(config: Any) -> bool:
    """Return whether the layers that draft have other heads than the model's.

    Or may skip steps whose requests are too long for them, where lengths of the model's
    heads depend on what they hold.
    """
    drafter = config.speculative_config.draft_model_config
    fields = attrgetter("total_num_attention_heads", "total_num_kv_heads", "head_size")
    if fields(drafter.model_arch_config) != fields(own_shape(config)):
        return True
    is_shorter = drafter.max_model_len < config.model_config.max_model_len
    return is_shorter and bool(is_ragged(config))


def _drafts_in_windows(config: Any) -> bool:
    drafter = SimpleNamespace(model_config=config.speculative_config.draft_model_config)
    return not set(layer_kinds(drafter)) <= {FULL}


def _block_is_odd(config: Any) -> bool:
    unit = compat.block_tokens(config.model_config)
    return config.cache_config.block_size % unit != 0


TRITON, FLASHINFER = "TRITON_ATTN", "FLASHINFER"


def backends(config: Any) -> set[str]:
    """Return the attention backends that were chosen, for all layers or by kind."""
    attention = config.attention_config
    chosen = [attention.backend, *attention.backend_per_kind.values()]
    return {backend.name for backend in chosen if backend is not None}


def _has_other_backend(config: Any) -> bool:
    is_latent = config.model_config.use_mla
    served = compat.LATENT_BACKENDS if is_latent else compat.ATTENTION_BACKENDS
    return not backends(config) <= {*served}


def uses_flashinfer(config: Any) -> bool:
    return FLASHINFER in backends(config)


def _splits_heads(config: Any) -> bool:
    ranks = config.parallel_config.tensor_parallel_size
    return ranks > own_shape(config).total_num_kv_heads


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


# Model types whose code in Transformers decides by itself which layers rotate; vLLM's
# own code of these models says it in attributes, see worker.layers.
DECIDING = {"cohere2", "cohere_compass", "exaone4", "exaone4_5", "exaone_moe"}
DECIDING |= {"granite_swa", "granitemoe_swa", "muse_glimmer"}


def mixes_windows(config: Any) -> bool:
    return {FULL, SLIDING} <= set(layer_kinds(config))


def has_two_sizes(config: Any) -> bool:
    """Return whether layers with a window have other heads than full attention."""
    return mixes_windows(config) and kv_heads(config) != kv_heads(config, SLIDING)


def has_states(config: Any) -> bool:
    """Return whether layers keep a state: Mamba, gated delta nets, convolutions."""
    return STATE in layer_kinds(config)


def _varying(config: Any) -> set[str]:
    """Return the fields that differ from layer to layer (Transformers' own word)."""
    text = config.model_config.hf_text_config
    return set(getattr(text, "per_layer_attributes", None) or ())


def _text(config: Any, name: str) -> Any:
    """Return what the model's own configuration says for all layers, or None."""
    if name in _varying(config):  # must not be read
        return None
    return getattr(config.model_config.hf_text_config, name, None)


def _is_one_of(names: tuple[str, ...], config: Any) -> bool:
    return not set(names).isdisjoint(config.model_config.architectures or ())


def _attends_by_itself(config: Any) -> bool:
    num_sinks = _text(config, "param_sink_number")
    return bool(num_sinks) or _is_one_of(compat.OWN_ATTENTION, config)


def _has_other_latents(config: Any) -> bool:
    """Return whether layers have latent vectors that are not known before loading.

    Or that vLLM's attention for CPUs cannot read.
    """
    model, rank = config.model_config, _text(config, "kv_lora_rank")
    if not has_latents(config):
        is_plain = _text(config, "model_type") in compat.EXPANDED
        is_off = compat.environment_flag("VLLM_MLA_DISABLE")
        return bool(rank) and not (is_plain or is_off)
    sizes = rank, _text(config, "qk_rope_head_dim")
    return model.using_transformers_backend() or (
        not is_on_gpu(config) and sizes != (512, 64)
    )


def _differs(config: Any) -> bool:
    """Return whether layers of a kind differ in heads, by fields of any kind.

    Or whether superblocks of two kinds cannot have one size in bytes, see
    `sizes.own_block_size`.
    """
    fields = "total_num_attention_heads", "total_num_kv_heads", "head_size"
    for kind in (FULL, SLIDING):
        if len({attrgetter(*fields)(each) for each in shapes(config, kind)}) > 1:
            return True
    smaller, larger = sorted(row_sizes(config))
    if larger % smaller:
        return True
    other = _text(config, "attention_other_setting") or {}
    found = (
        (other.get("head_dim"), "head_dim"),
        (other.get("num_attention_groups"), "num_attention_groups"),
    )
    if any(value not in (None, _text(config, name)) for value, name in found):
        return True
    per_layer = _text(config, "num_attention_heads_per_layer") or ()
    blocks = _text(config, "block_configs") or ()
    groups = {
        _field(_field(block, "attention"), "n_heads_in_group") for block in blocks
    }
    heads = {
        count
        for count, kind in zip(per_layer, layer_kinds(config), strict=False)
        if kind == FULL
    }
    own = _text(config, "num_attention_heads")
    return not heads <= {own} or len(groups - {None}) > 1


def _field(entry: Any, name: str) -> Any:
    """Return a field of a nested configuration, which may be an object or a dict."""
    return entry.get(name) if isinstance(entry, dict) else getattr(entry, name, None)


def _has_other_windows(config: Any) -> bool:
    """Return whether windows are not of the size that the configuration names."""
    return (
        _text(config, "interleaved_sliding_window") is not None
        or _text(config, "sliding_window_size")
        not in (None, _text(config, "sliding_window"))
        or _num_sizes(_text(config, "sliding_windows")) > 1
        or (
            SLIDING in layer_kinds(config)
            and _text(config, "model_type") in compat.WIDER_WINDOWS
        )
    )


def _num_sizes(windows: Any) -> int:
    """Return how many sizes a list of windows has; one size may stand for it."""
    return len(set(windows) - {None}) if isinstance(windows, list | tuple) else 1


def _has_unknown_sinks(config: Any) -> bool:
    """Return whether a Granite has learned sinks; see vLLM's granite.py."""
    given = _text(config, "attention_sinks")
    has_sinks = bool(layer_kinds(config)) if given is None else given
    return has_sinks and _text(config, "model_type") in compat.UNTESTED_SINKS


def _parameters(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of rotations, those of kinds of layers one by one."""
    found = getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}
    return [found, *(each for each in found.values() if isinstance(each, dict))]


def _code_decides(config: Any) -> bool:
    """Return whether only a model's code in Transformers tells how it rotates."""
    kinds = {each.get("rope_type") for each in _parameters(config)}
    differs = kinds & {"dynamic", "longrope"} or _text(config, "model_type") in DECIDING
    return bool(differs) and config.model_config.using_transformers_backend()


def one_only(feature: str, name: str, beside: Question | None = None) -> Refusal:
    """Return the row of a parallelism, alone or beside something else."""
    found = several(name) if beside is None else all_of(beside, several(name))
    return Refusal(feature, found, f"set --{name.replace('_', '-')}-size 1")


def left_out(feature: str, field: str) -> Refusal:
    """Return the row of a field that a flag of the same name sets."""
    flag = field.partition(".")[2].replace("_", "-")
    return Refusal(feature, on(field), f"leave out --{flag}")


def unset(feature: str, name: str, why: str = "") -> Refusal:
    """Return the row of one of vLLM's own switches in the environment."""

    def is_set(config: Any) -> bool:
        return compat.environment_flag(name)

    return Refusal(feature, is_set, f"unset {name}{why}", by_machine=True)


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
    Refusal("custom worker classes", _own_worker, "leave out --worker-cls"),
    Refusal("custom scheduler classes", _own_scheduler, "leave out --scheduler-cls"),
    Refusal(
        "unchunked prefill",
        off("scheduler_config.enable_chunked_prefill"),
        "leave out --no-enable-chunked-prefill",
    ),
    Refusal(
        "block sizes that the attention kernel cannot split",
        _block_is_odd,
        "set --block-size to a multiple of 32 on CPU or of 16 on CUDA and with MLA, or "
        "leave it out",
    ),
    Refusal(
        "other attention backends",
        _has_other_backend,
        f"leave out --attention-backend ({', '.join(compat.ATTENTION_BACKENDS)} work, "
        f"and {', '.join(compat.LATENT_BACKENDS)} with MLA)",
    ),
    Refusal(
        "FlashInfer with per-head lengths ({ragged})",
        all_of(uses_flashinfer, is_ragged),
        "leave out --attention-backend",
    ),
    Refusal(
        "attention fused with the quantisation of its output, with per-head lengths "
        "({ragged})",
        all_of(on("compilation_config.pass_config.fuse_attn_quant"), is_ragged),
        'set "pass_config": {"fuse_attn_quant": false} in --compilation-config',
    ),
    Refusal(
        f"{_SELECTING} on more ranks than KV heads",
        all_of(selects, _splits_heads),
        "set --tensor-parallel-size to the model's KV heads or less: a page's score is "
        "over all query heads of a KV head",
    ),
    one_only("pipeline parallelism", "pipeline_parallel"),
    Refusal(
        "data parallelism of mixture-of-experts models",
        all_of(several("data_parallel"), on("model_config.is_moe")),
        "set --data-parallel-size 1 and start one server per replica",
    ),
    Refusal(
        "data parallelism over Ray",
        lambda config: config.parallel_config.data_parallel_backend == "ray",
        "leave out --data-parallel-backend",
    ),
    one_only("decode context parallelism", "decode_context_parallel"),
    one_only("prefill context parallelism", "prefill_context_parallel"),
    Refusal(
        "executors other than uni and mp, and external_launcher on several ranks",
        has_other_executor,
        "leave out --distributed-executor-backend, or set --tensor-parallel-size 1: "
        "on more ranks each would have a scheduler of its own",
    ),
    left_out("dual batch overlap", "parallel_config.enable_dbo"),
    Refusal("microbatches", several("ubatch"), "leave out --ubatch-size"),
    left_out("elastic expert parallelism", "parallel_config.enable_elastic_ep"),
    left_out("fault tolerance", "parallel_config.enable_fault_tolerance"),
    Refusal(
        "speculative decoding by draft models and other methods than n-grams, suffix "
        "trees, MTP and EAGLE",
        all_of(
            speculates,
            lambda config: config.speculative_config.method not in DRAFTERS + LAYERED,
        ),
        'set "method": "ngram" or "suffix" in --speculative-config, or leave it out',
    ),
    Refusal(
        "MTP and EAGLE on GPUs, or with vLLM's second model runner",
        all_of(drafts_in_layers, any_of(is_on_gpu, on("use_v2_model_runner"))),
        'set "method": "ngram" or "suffix" in --speculative-config; on a CPU unset '
        "VLLM_USE_V2_MODEL_RUNNER or set it to 0",
    ),
    Refusal(
        "MTP and EAGLE with other heads than the model's, in several modules, in "
        "parallel, without padding, for fewer tokens with per-head lengths, or with "
        "admissions, selections, files for the model's weights ({fitted}), LoRA "
        "adapters, FP8 KV caches or tensor parallelism",
        all_of(
            drafts_in_layers,
            any_of(
                _unlike_drafter,
                lambda config: config.speculative_config.use_multi_module_mtp(),
                on("speculative_config.parallel_drafting"),
                on("speculative_config.disable_padded_drafter_batch"),
                selects,
                admits,
                is_fitted,
                has_adapters,
                is_float8,
                several("tensor_parallel"),
            ),
        ),
        'set "method": "ngram" or "suffix" in --speculative-config',
    ),
    Refusal(
        "speculative decoding with what measures each token ({measures_tokens})",
        all_of(speculates, has_word_with("measures_tokens")),
        "leave out --speculative-config: a token is compared with the one before it, "
        "which may be a draft that is rejected",
    ),
    Refusal(
        "LoRA adapters with a policy for the model's own weights ({fitted})",
        all_of(has_adapters, is_fitted),
        "leave out --enable-lora, or merge the adapter into the model and make the "
        "policy's file for that",
    ),
    # Attention layers.
    Refusal(
        "sliding windows in every layer",
        lambda config: (
            (
                config.cache_config.sliding_window is not None
                and not _text(config, "hybrid_layer_pattern")  # which goes before it
            )
            or set(layer_kinds(config)) == {SLIDING}
        ),
        "serve a model of which some layers attend to the whole context",
    ),
    Refusal(
        "sliding-window layers without the hybrid KV cache manager",
        all_of(mixes_windows, on("scheduler_config.disable_hybrid_kv_cache_manager")),
        "leave out --disable-hybrid-kv-cache-manager",
    ),
    Refusal(
        "full attention in several KV cache groups",
        all_of(
            any_of(mixes_windows, has_states),
            lambda config: other_groups(config).num_full_groups > 1,
        ),
        "serve a model with fewer layers of full attention than other ones, or with "
        "less than half as many more",
    ),
    Refusal(
        f"{_SELECTING} with sliding-window layers",
        all_of(mixes_windows, selects),
        "choose a policy without it",
    ),
    Refusal(
        "layers with a sliding window or a state, with a policy for the model's own "
        "weights ({fitted})",
        all_of(any_of(mixes_windows, has_states), is_fitted),
        "choose another policy: no file was made or tested for such a model",
    ),
    Refusal(
        "speculative decoding with layers that have a state",
        all_of(has_states, speculates),
        "leave out --speculative-config",
    ),
    Refusal(
        "MTP and EAGLE with sliding-window layers or learned sinks",
        all_of(drafts_in_layers, any_of(mixes_windows, has_sinks, _drafts_in_windows)),
        'set "method": "ngram" or "suffix" in --speculative-config',
    ),
    Refusal(
        "layers other than full attention, sliding windows and states",
        lambda config: set(layer_kinds(config)) - {FULL, SLIDING, STATE},
        "serve a model whose layers are of these kinds",
    ),
    Refusal(
        "layers with a state beside sliding windows, or that the model does not name",
        all_of(
            on("model_config.is_hybrid"),
            any_of(mixes_windows, lambda config: not has_states(config)),
        ),
        "serve another model: what its layers hold is not known before it is loaded",
    ),
    Refusal(
        "layers with a state on the Transformers backend, or without full attention",
        all_of(
            has_states,
            any_of(
                off("model_config.is_hybrid"),
                lambda config: FULL not in layer_kinds(config),
            ),
        ),
        "leave out --model-impl, or serve a model with layers of full attention",
    ),
    Refusal(
        "what measures each token ({measures_tokens}), beside layers with a state or "
        "in Gemma 3n",
        all_of(
            any_of(has_states, text_has("altup_num_inputs")),
            has_word_with("measures_tokens"),
        ),
        "choose another policy: changes of hidden states are read from one list of "
        "layers that all attend",
    ),
    Refusal(
        "FlashInfer with layers that have a state, or heads of two sizes",
        all_of(uses_flashinfer, any_of(has_states, has_two_sizes)),
        "leave out --attention-backend: their superblocks are too large for it",
    ),
    Refusal(
        "keys of the prefix cache for less than a superblock",
        all_of(
            any_of(has_states, mixes_windows), given("cache_config.prefix_match_unit")
        ),
        "leave out --prefix-match-unit",
    ),
    Refusal(
        "attention layers of a model's own",
        _attends_by_itself,
        "serve a model with vLLM's own layers of full attention or sliding windows",
    ),
    Refusal(
        "values of another size than keys (MiMo-V2)",
        has_other_values,
        "serve a model whose `v_head_dim` is its `head_dim`: for others vLLM has "
        "backends for GPUs alone (DIFFKV), of which there is no subclass of ours",
    ),
    Refusal(
        "layers that differ in heads or head sizes",
        _differs,
        "serve a model whose layers differ in their windows alone",
    ),
    Refusal(
        "sliding windows of several sizes, or of others than `sliding_window`",
        _has_other_windows,
        "serve a model whose windows all have the size that it names",
    ),
    Refusal(
        "ALiBi, whose biases depend on distances that events change",
        lambda config: _is_one_of(compat.ALIBI, config) or _text(config, "alibi"),
        "serve a model with rotary positions",
    ),
    Refusal(
        "attention logit soft caps, which scorers do not model",
        text_has("attn_logit_softcapping"),
        "serve a model without attn_logit_softcapping",
    ),
    Refusal(
        "learned sinks of other models than gpt-oss",
        _has_unknown_sinks,
        "serve a model without learned sinks, or gpt-oss",
    ),
    Refusal(
        "attention-free models",
        on("model_config.is_attention_free"),
        "leave out --kv-policy: there is no KV cache",
    ),
    # Heads that share a latent vector.
    Refusal(
        "multi-head latent attention (MLA) with what reads or sizes KV heads one by "
        "one ({reads_heads})",
        all_of(has_latents, any_of(has_word_with("reads_heads"), is_ragged)),
        "choose other policies, also in `allow`: a layer keeps one vector per token "
        "for all its heads",
    ),
    Refusal(
        "multi-head latent attention with sparse attention of its own (DeepSeek-V3.2 "
        "and V4, GLM-5)",
        all_of(
            has_latents, any_of(text_has("index_topk"), text_has("compress_ratios"))
        ),
        "leave out --kv-policy: the model itself chooses what it reads, and its index "
        "has no pages for policies",
    ),
    Refusal(
        "multi-head latent attention on the Transformers backend, of a type that vLLM "
        "does not count as such, or on CPUs of other sizes than 512 + 64",
        _has_other_latents,
        "leave out --model-impl, or serve another model",
    ),
    Refusal(
        "multi-head latent attention beside layers with a state",
        all_of(has_latents, on("model_config.is_hybrid")),
        "serve a model whose layers all have a KV cache",
    ),
    Refusal(
        "multi-head latent attention with FP8 KV caches, LoRA adapters, MTP or EAGLE",
        all_of(has_latents, any_of(is_float8, has_adapters, drafts_in_layers)),
        "leave out --enable-lora and --speculative-config, and --kv-cache-dtype, or "
        "name the model's own dtype there where the checkpoint asks for FP8",
    ),
    Refusal(
        "hierarchical sparse attention (HiSparse)",
        given("attention_config.hisparse_config"),
        "remove its --attention-config entry",
    ),
    Refusal(
        "non-causal attention",
        on("attention_config.use_non_causal"),
        "remove its --attention-config entry",
    ),
    Refusal(
        "KV sharing between layers on the Transformers backend",
        all_of(
            text_has("num_kv_shared_layers"),
            lambda config: config.model_config.using_transformers_backend(),
        ),
        "leave out --model-impl",
    ),
    left_out(
        "prefill without the layers that share keys and values",
        "cache_config.kv_sharing_fast_prefill",
    ),
    # How it rotates.
    Refusal(
        "dual chunk attention",
        text_has("dual_chunk_attention_config"),
        "serve a model without `dual_chunk_attention_config`",
    ),
    Refusal(
        "Fourier position embeddings (FoPE) with {rotates}",
        all_of(
            reads_rotations,
            lambda config: any(each.get("use_fope") for each in _parameters(config)),
        ),
        "choose another policy",
    ),
    Refusal(
        "heads with a rotated part of their own (`qk_rope_head_dim`) with {rotates}",
        all_of(
            reads_rotations, text_has("qk_rope_head_dim"), off("model_config.use_mla")
        ),
        "choose another policy",
    ),
    Refusal(
        "the Transformers backend where rotations depend on the length of a text, or "
        "its code leaves them out in some layers, with {rotates}",
        all_of(reads_rotations, _code_decides),
        "leave out --model-impl, or choose another policy",
    ),
    Refusal(
        "models without rotary positions in any layer with {rotates}",
        all_of(
            reads_rotations,
            lambda config: _text(config, "model_type") in compat.UNROTATED,
        ),
        "choose another policy",
    ),
    # Learned sinks.
    Refusal(
        "learned sinks (gpt-oss) with attention of a policy's own ({weighs_itself})",
        all_of(has_sinks, has_word_with("weighs_itself")),
        "choose other policies, also in `allow`: theirs leaves sinks out",
    ),
    Refusal(
        "per-head lengths with learned sinks",
        all_of(has_sinks, is_ragged),
        "choose policies whose heads keep equal numbers of tokens, also in `allow`",
    ),
    one_only("tensor parallelism with learned sinks", "tensor_parallel", has_sinks),
    Refusal(
        "LoRA adapters with learned sinks",
        all_of(has_sinks, has_adapters),
        "leave out --enable-lora, or merge the adapter into the model",
    ),
    Refusal(
        "weight transfer with learned sinks",
        all_of(has_sinks, transfers_weights),
        "leave out --weight-transfer-config",
    ),
    Refusal(
        "FP8 KV caches with learned sinks",
        all_of(has_sinks, is_float8),
        "leave out --kv-cache-dtype",
    ),
    # What it is.
    Refusal(
        "pooling models",
        lambda config: config.model_config.runner_type != "generate",
        "leave out --kv-policy: these models do not generate tokens",
    ),
    Refusal(
        "encoder-decoder models",
        on("model_config.is_encoder_decoder"),
        "serve a decoder-only model",
    ),
    Refusal(
        "prefix-LM attention",
        on("model_config.is_mm_prefix_lm"),
        "serve a model with causal attention",
    ),
    Refusal(
        "residual sliding-window attention (R-SWA)",
        given("model_config.rswa_window"),
        "serve a model whose layers all attend to the whole context",
    ),
    Refusal(
        "diffusion models",
        any_of(given("diffusion_config"), on("model_config.is_diffusion")),
        "serve an autoregressive model",
    ),
    Refusal(
        "images, audio and video",
        on("model_config.supports_multimodal_inputs"),
        "add --language-model-only to serve a multimodal model for text",
    ),
    Refusal(
        "multimodal models with a policy for the model's own weights ({fitted})",
        all_of(is_fitted, on("model_config.is_multimodal_model")),
        "serve a text model: no files were made or tested for text parts of others",
    ),
    Refusal(
        "KV caches of other dtypes than the model's and FP8",
        _converts_cache,
        f"set --kv-cache-dtype to {', '.join(compat.FLOAT8_CACHES)} or the model's own "
        "dtype, or leave it out",
    ),
    Refusal(
        "FP8 KV caches on GPUs with other attention than Triton's",
        all_of(is_float8, is_on_gpu, lambda config: backends(config) != {TRITON}),
        "set --attention-backend TRITON_ATTN, leave out --kv-cache-dtype, or name the "
        "model's own dtype where the checkpoint asks for FP8: other attention wants "
        "FP8 queries, which no scorer reads",
    ),
    Refusal(
        "FP8 KV caches on GPUs before compute capability 8.9",
        all_of(
            is_float8,
            is_on_gpu,
            lambda config: (compat.gpu_capability() or (9, 0)) < (8, 9),
        ),
        "leave out --kv-cache-dtype: vLLM's Triton attention reads no FP8 there",
    ),
    Refusal(
        "FP8 KV caches of E5M2 on GPUs",
        all_of(lambda config: config.cache_config.cache_dtype == "fp8_e5m2", is_on_gpu),
        "set --kv-cache-dtype fp8: vLLM's Triton attention reads and writes E4M3",
    ),
    Refusal(
        "FP8 KV caches on CPUs without AVX-512",
        all_of(
            is_float8,
            lambda config: not is_on_gpu(config) and not compat.reads_float8(),
        ),
        "leave out --kv-cache-dtype, or name the model's own dtype where the "
        "checkpoint asks for FP8: vLLM's attention reads FP8 with AVX-512 or AMX only",
    ),
    Refusal(
        "KV connectors and KV offloading",
        any_of(on("kv_transfer_config"), on("cache_config.kv_offloading_size")),
        "leave out --kv-transfer-config and --kv-offloading-size",
    ),
    Refusal(
        "encoder-cache connectors",
        given("ec_transfer_config"),
        "leave out --ec-transfer-config",
    ),
    Refusal(
        "KV cache events",
        all_of(on("kv_events_config"), on("kv_events_config.enable_kv_cache_events")),
        "leave out --kv-events-config",
    ),
    Refusal(
        "routed experts in answers",
        on("aux_output_config.enabled"),
        "leave out --enable-return-routed-experts: vLLM stores the experts of as many "
        "tokens as the pool has room for, by the tokens alone; with a policy requests "
        "have more of them, and their experts depend on what was dropped",
    ),
    Refusal(
        "cascade attention",
        off("model_config.disable_cascade_attn"),
        "leave out --no-disable-cascade-attn",
    ),
    left_out("prompt embeddings", "model_config.enable_prompt_embeds"),
    Refusal(
        "sleep mode with a policy for the model's own weights ({fitted})",
        all_of(sleeps, is_fitted),
        "leave out --enable-sleep-mode: who sleeps may wake up with other weights",
    ),
    Refusal(
        "weight transfer with a policy for the model's own weights ({fitted})",
        all_of(transfers_weights, is_fitted),
        "leave out --weight-transfer-config: the policy's file belongs to the weights "
        "that are replaced",
    ),
    unset("batch-invariant mode", "VLLM_BATCH_INVARIANT"),
    unset(
        "memory plans of earlier starts",
        "VLLM_ENABLE_STARTUP_PLAN",
        ": a plan does not know the policy",
    ),
    unset(
        "the Rust front end", "VLLM_USE_RUST_FRONTEND", ": it does not check requests"
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
