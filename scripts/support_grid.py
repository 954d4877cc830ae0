"""The grid of docs/support.md: which kinds of policies go with which features of vLLM.

A cell is refused where the guards refuse a server that has the feature on; else it says
what ran the two together, or that nothing has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from vllm_kvpolicy import compat
from vllm_kvpolicy.api.guards import REFUSALS
from vllm_kvpolicy.compat import WORKER_CLASSES
from vllm_kvpolicy.policies.names import (
    ADMISSIONS,
    ALLOCATORS,
    SCORERS,
    SELECTIONS,
    parse,
)

EQUAL, OWN, FITTED, ADMISSION, SELECTION = KINDS = (
    "equal lengths",
    "per-head lengths",
    "calibrated scorers",
    "admissions",
    "selections",
)
EXAMPLES: dict[str, dict[str, Any]] = {
    EQUAL: {"policy": "ams-tova"},
    OWN: {"policy": "adakv-snapkv"},
    FITTED: {"policy": "qfilter", "policy_config": {"qfilter_calibration": "a file"}},
    ADMISSION: {"policy": "wgkv", "policy_config": {"wgkv_gates": "a file"}},
    SELECTION: {"policy": "snapkv+quest"},
}
GPU = "benchmarks/gpu/check/engines.py"
TP = "tests/engine/test_tensor_parallel.py"
FP8 = "tests/engine/test_plumbing_oracle.py"
FP8_ADMISSIONS = "tests/engine/test_float8.py"
CACHE = "tests/engine/test_prefix_caching.py"
TEXT = "tests/engine/test_text_only.py"
DRAFTS = "tests/engine/test_speculation.py"
LAYERED = "tests/engine/test_layers_that_draft.py"
STATES = "tests/engine/test_identity.py"


class _Shape(SimpleNamespace):
    """The same for each layer."""

    def __getitem__(self, index: int) -> "_Shape":
        return self


_SHAPE = _Shape(total_num_attention_heads=4, total_num_kv_heads=2, head_size=32)
_EAGLE = SimpleNamespace(
    method="eagle3",
    parallel_drafting=False,
    disable_padded_drafter_batch=False,
    use_multi_module_mtp=lambda: False,
    draft_model_config=SimpleNamespace(
        model_arch_config=_SHAPE, max_model_len=4096, hf_text_config=SimpleNamespace()
    ),
)


@dataclass(frozen=True)
class Feature:
    """A column of the grid.

    Args:
        name: as readers of vLLM's documentation know it.
        changes: dotted attributes of a finished VllmConfig that switch it on.
        word: what every file in `ran` calls it.
        ran: by kind of policy, the file that runs the two together.
    """

    name: str
    changes: Mapping[str, Any]
    word: str
    ran: Mapping[str, str]


FEATURES = (
    Feature(
        "chunked prefill",
        {"scheduler_config.enable_chunked_prefill": True},
        "max_num_batched_tokens",
        {
            **dict.fromkeys(
                (EQUAL, OWN, FITTED), "tests/engine/test_plumbing_oracle.py"
            ),
            ADMISSION: "tests/engine/test_admitted_tokens.py",
            SELECTION: "tests/engine/test_quest.py",
        },
    ),
    Feature(
        "prefix caching",
        {"cache_config.enable_prefix_caching": True},
        "enable_prefix_caching",
        dict.fromkeys(KINDS, CACHE),
    ),
    Feature(
        "async scheduling",
        {"scheduler_config.async_scheduling": True},
        "async_scheduling",
        {EQUAL: CACHE, OWN: CACHE, ADMISSION: CACHE},
    ),
    Feature(
        "CUDA graphs",
        {"model_config.enforce_eager": False},
        "graphs",
        {EQUAL: GPU, OWN: GPU},
    ),
    Feature(
        "tensor parallel",
        {"parallel_config.tensor_parallel_size": 2},
        "tensor_parallel_size",
        dict.fromkeys(KINDS, TP),
    ),
    Feature(
        "pipeline parallel",
        {"parallel_config.pipeline_parallel_size": 2},
        "pipeline_parallel_size",
        {},
    ),
    Feature(
        "data parallel",
        {"parallel_config.data_parallel_size": 2},
        "data-parallel-size",
        {EQUAL: "tests/serve/test_data_parallel.py"},
    ),
    Feature(
        "FP8 KV cache (needs AVX-512)",
        {"cache_config.cache_dtype": "fp8"},
        "fp8",
        dict.fromkeys((EQUAL, OWN, FITTED), FP8)
        | dict.fromkeys((ADMISSION, SELECTION), FP8_ADMISSIONS),
    ),
    Feature(
        "n-gram speculation",
        {"speculative_config": SimpleNamespace(method="ngram")},
        "speculative_config",
        dict.fromkeys(KINDS, DRAFTS),
    ),
    Feature(
        "suffix speculation (tests need `arctic-inference`)",
        {"speculative_config": SimpleNamespace(method="suffix")},
        "suffix",
        dict.fromkeys(KINDS, DRAFTS),
    ),
    Feature(
        "MTP and EAGLE",
        {"speculative_config": _EAGLE},
        "eagle3",
        {EQUAL: LAYERED, OWN: LAYERED},
    ),
    Feature(
        "LoRA",
        {"lora_config": object()},
        "enable_lora",
        {EQUAL: "tests/engine/test_lora.py"},
    ),
    Feature(
        "text of multimodal models",
        {"model_config.is_multimodal_model": True},
        "language_model_only",
        {EQUAL: TEXT, OWN: TEXT},
    ),
    Feature(
        "layers with a state: Mamba, gated delta nets, short convolutions",
        {
            "model_config.is_hybrid": True,
            "model_config.hf_text_config.layer_types": ["conv", "full_attention"],
        },
        "lfm2",
        {EQUAL: STATES, OWN: STATES},
    ),
)


def kind_of(name: str) -> str:
    """Return the kind of a policy; each has one.

    Args:
        name: of a policy that serves, no test policy.
    """
    info = parse(name)
    if any(row.fitted for row in info.parts):
        return FITTED if info.admission is None else ADMISSION
    if info.selection is not None:
        return SELECTION
    return OWN if info.is_ragged({}) else EQUAL


def cell(kind: str, feature: Feature) -> str:
    """Return `refused`, what ran the two together, or `untested`."""
    if refused(server_with(EXAMPLES[kind], feature.changes)):
        return "refused"
    ran = feature.ran.get(kind)
    return {None: "untested", GPU: "GPU, once"}.get(ran, "tested")


def refused(config: Any) -> list[str]:
    """Return the rows of the guards that refuse a server, whatever the machine."""
    with patch.object(compat, "reads_float8", return_value=True):
        rows = [row for row in REFUSALS if not row.by_machine and row.applies(config)]
    return [row.name for row in rows]


def grid() -> list[str]:
    """Return the section of the page."""
    lines = [
        "## What goes with what",
        "",
        "*Tested*: a test serves the two together on a CPU. *GPU, once*: a check on an "
        "H200 did ([performance.md](performance.md)). *Untested*: "
        "served, but no test that passed runs the two together. *Refused*: at "
        "start-up, with what to change ([below](#not-supported-with-a-policy)).",
        "",
        "| | " + " | ".join(KINDS) + " |",
        "|---|" + "---|" * len(KINDS),
    ]
    for feature in FEATURES:
        cells = [cell(kind, feature) for kind in KINDS]
        lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    return [*lines, "", *_members(), ""]


def _members() -> Iterator[str]:
    """Yield what the kinds consist of."""
    words = {**SCORERS, **ALLOCATORS, **ADMISSIONS, **SELECTIONS}
    fitted = [name for name in SCORERS if words[name].fitted]
    own = [name for name in ALLOCATORS if words[name].ragged]
    own += [name for name in ADMISSIONS if not words[name].fitted]
    trained = [name for name in ADMISSIONS if words[name].fitted]
    yield (
        f"Per-head lengths: {_code(own)}. Calibrated scorers: {_code(fitted)}, with "
        f"any allocator. Admissions: {_code(trained)}, alone or with an eviction. "
        f"Selections: {_code(SELECTIONS)}, alone or behind an eviction. Equal lengths: "
        "all others."
    )


def _code(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def server_with(policy: dict[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return what the guards read of a finished VllmConfig.

    Args:
        changes: dotted attributes, in place of those of a plain server.
    """
    config = plain_server(policy)
    for path, value in changes.items():
        *parts, last = path.split(".")
        place = config
        for part in parts:
            place = getattr(place, part)
        setattr(place, last, value)
    return config


def plain_server(policy: dict[str, Any]) -> Any:
    """Return a server of a dense text model of which nothing is refused."""
    off = dict.fromkeys(
        (
            *("speculative_config", "lora_config", "kv_transfer_config"),
            *("ec_transfer_config", "kv_events_config", "diffusion_config"),
            "weight_transfer_config",
        )
    )
    return SimpleNamespace(
        use_v2_model_runner=False,
        additional_config={"kv_policy": policy},
        model_config=_model(),
        parallel_config=SimpleNamespace(
            worker_cls=next(iter(WORKER_CLASSES)),
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            world_size=1,
            data_parallel_size=1,
            data_parallel_backend="mp",
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            distributed_executor_backend=None,
            enable_dbo=False,
            ubatch_size=0,
            enable_elastic_ep=False,
            enable_fault_tolerance=False,
        ),
        scheduler_config=SimpleNamespace(
            async_scheduling=False,
            max_num_batched_tokens=2048,
            scheduler_cls=None,
            enable_chunked_prefill=True,
        ),
        cache_config=SimpleNamespace(
            block_size=32,
            sliding_window=None,
            kv_sharing_fast_prefill=False,
            cache_dtype="auto",
            kv_offloading_size=None,
            mamba_cache_mode="none",
            prefix_match_unit=None,
        ),
        attention_config=SimpleNamespace(
            backend=None,
            backend_per_kind={},
            hisparse_config=None,
            use_non_causal=False,
        ),
        aux_output_config=SimpleNamespace(enabled=False),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(fuse_attn_quant=False)
        ),
        **off,
    )


def _model() -> Any:
    no = dict.fromkeys(
        (
            *("is_moe", "is_hybrid", "is_attention_free", "use_mla", "is_diffusion"),
            *("is_encoder_decoder", "is_mm_prefix_lm", "supports_multimodal_inputs"),
            *("is_multimodal_model", "enable_prompt_embeds", "enable_sleep_mode"),
        ),
        False,
    )
    return SimpleNamespace(
        hf_text_config=SimpleNamespace(layer_types=None),
        architectures=[],
        max_model_len=4096,
        model_arch_config=_SHAPE,
        get_num_kv_heads=lambda parallel, shape: shape.total_num_kv_heads,
        dtype="bfloat16",
        disable_cascade_attn=True,
        runner_type="generate",
        rswa_window=None,
        **no,
    )
