"""The allocators: a row and, where there are any, a model of options for each.

An allocator says how the budget is shared among layers, heads and regions.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from vllm_kvpolicy.policies.catalogue.options import (
    MOST_TOKENS,
    AtLeast,
    Options,
    PoolOptions,
    WindowOptions,
)
from vllm_kvpolicy.policies.catalogue.rows import WordRow


class AMSOptions(PoolOptions):
    """Options of `ams`.

    The defaults are Table 15 of the paper with the window of the authors' code: of the
    settings tried, the one whose segment counts come closest to the paper's Table 14.
    """

    preset: Literal["default", "paper", "code"] = Field(
        "default", description="named set of defaults for the keys that are not given"
    )
    segment_mass: float = Field(
        0.1, ge=0.001, lt=1, description="attention mass of a segment"
    )
    min_segment: int = Field(
        16,
        ge=1,
        le=MOST_TOKENS,
        description="minimum segment length in tokens; shorter segments are merged",
    )
    max_segment: Annotated[int, AfterValidator(AtLeast("min_segment"))] = Field(
        256,
        ge=1,
        le=MOST_TOKENS,
        description="maximum segment length in tokens; longer segments are split",
    )
    min_quota: int = Field(
        1, ge=0, le=MOST_TOKENS, description="minimum quota of a segment in tokens"
    )
    ema_decay: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="weight of the credit from earlier events at each event",
    )
    ema_mix: float = Field(
        0.9,
        ge=0,
        le=1,
        description="weight of the current mass in the average; 1 uses no earlier "
        "events",
    )
    quotas: Literal["mass", "uniform"] = Field(
        "mass", description="how segments share the budget: by mass, or equally"
    )
    segments: Literal["mass", "fixed"] = Field(
        "mass",
        description="segment boundaries: by mass, or every `fixed_segment` tokens",
    )
    fixed_segment: int = Field(
        128,
        ge=1,
        le=MOST_TOKENS,
        description="segment length in tokens if `segments` is fixed",
    )
    suffix_pad: Literal["max", "mean", "none"] = Field(
        "max", description="mass assigned to each of the newest `window` tokens"
    )
    parity: bool = Field(False, description="reproduce the authors' code exactly")


AMS_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    # Table 15 as printed; the paper leaves the number of recent tokens open.
    "paper": {"window": 128},
    # The defaults of the authors' evaluation registry.
    "code": {
        "segment_mass": 0.02,
        "min_segment": 32,
        "max_segment": 1024,
        "min_quota": 8,
        "ema_decay": 0.8,
        "ema_mix": 0.7,
    },
}


class AdaKVOptions(Options):
    """Options of `adakv`."""

    adakv_floor: float = Field(
        0.2, ge=0, le=1, description="fraction of the budget reserved for each head"
    )


class PyramidOptions(Options):
    """Options of `pyramid`."""

    pyramid_beta: float = Field(
        20.0,
        ge=1,
        le=1_000_000,
        description="the budget divided by the last layer's budget",
    )
    pyramid_headroom: int = Field(
        512,
        ge=0,
        le=MOST_TOKENS,
        description="tokens above the budget that the first layer may hold, if it "
        "has that many",
    )


class ChunkOptions(Options):
    """Options of `chunk`."""

    chunk_length: int = Field(20, ge=1, le=MOST_TOKENS, description="tokens per chunk")


class StratOptions(Options):
    """Options of `strat`."""

    strat_block: int = Field(256, ge=1, le=MOST_TOKENS, description="tokens per block")


class TrimOptions(Options):
    """Options of `trim`."""

    trim_share: float = Field(
        0.1,
        ge=0.01,
        le=1,
        description="share of each head's tokens that is dropped at a time",
    )


class HardOptions(WindowOptions):
    """Options of `hard`."""

    hard_p: float = Field(
        0.9, ge=0.01, le=1, description="attention mass that a nucleus covers (top-p)"
    )
    hard_lower: float = Field(
        0.25,
        ge=0,
        le=1,
        description="minimum size of a head, as a multiple of the budget",
    )
    hard_upper: float = Field(
        4.0,
        ge=1,
        le=1_000_000,
        description="maximum size of a head, as a multiple of the budget",
    )
    hard_order: Literal["method", "attention"] = Field(
        "method",
        description="order in which keys enter a nucleus: by the scorer's scores, "
        "or by each query's attention",
    )
    hard_mode: Literal["fixed", "dynamic"] = Field(
        "fixed",
        description="fixed spends the whole budget, dynamic only what the nuclei need",
    )
    hard_scope: Literal["model", "layer"] = Field(
        "layer",
        description="heads that share a budget: all of the model, or those "
        "of one layer",
    )
    hard_merge: bool = Field(False, description="merge dropped tokens into kept tokens")


_RECENCY = "recency does not measure importance within a region or a head"
_ALIKE = "all KV heads get the same scores, which cannot divide the budget among them"
_SPREAD = "scores are distributed alike in all KV heads and cannot divide the budget"
_WITHIN = (
    "scores are relative to a block of one KV head and cannot be compared between "
    "heads, so they cannot divide the budget"
)
# The empty word is the allocator of a name without one.
ALLOCATORS = {
    "": WordRow(
        "vllm_kvpolicy.policies.allocators.uniform:UniformTopK",
        "the best tokens of each head",
        "kvpress 0.4.0, ScorerPress",
    ),
    "ams": WordRow(
        "vllm_kvpolicy.policies.allocators.ams:AMSAllocator",
        "segments of equal attention mass, each with its own quota",
        "AMS, arXiv 2605.23200",
        options=AMSOptions,
        window="window",
        presets=AMS_PRESETS,
        refuses={"streaming": _RECENCY},
    ),
    "adakv": WordRow(
        "vllm_kvpolicy.policies.allocators.adakv:AdaKVAllocator",
        "the best tokens of each layer, over all its heads",
        "Ada-KV, arXiv 2407.11550",
        options=AdaKVOptions,
        ragged=True,
        refuses={
            "streaming": _ALIKE,
            "tova": _ALIKE,
            "rpc": _ALIKE,
            "epikv": _ALIKE,
            "lagkv": _WITHIN,
            "random": _SPREAD,
        },
    ),
    "pyramid": WordRow(
        "vllm_kvpolicy.policies.allocators.pyramid:PyramidAllocator",
        "smaller budgets for deeper layers",
        "PyramidKV, arXiv 2406.02069",
        options=PyramidOptions,
        ragged=True,
    ),
    "chunk": WordRow(
        "vllm_kvpolicy.policies.allocators.chunk:ChunkAllocator",
        "the best chunks of adjacent tokens, the same in all heads of a layer",
        "ChunkKV, arXiv 2502.00299",
        options=ChunkOptions,
        refuses={"streaming": _RECENCY},
    ),
    "hard": WordRow(
        "vllm_kvpolicy.policies.allocators.hard:HardAllocator",
        "each head's size follows how many keys hold most of its attention",
        "Hard-KV",
        options=HardOptions,
        window="window",
        ragged=True,
        dynamic=("hard_mode", "dynamic"),
        weighs_itself=True,
        refuses={"streaming": _RECENCY},
    ),
    "trim": WordRow(
        "vllm_kvpolicy.policies.allocators.trim:TrimAllocator",
        "while heads hold more than the budget on average, each drops its lowest tenth",
        "WG-KV, arXiv 2512.17452, appendix K.1",
        options=TrimOptions,
        ragged=True,
        dynamic=True,
        refuses={"streaming": _RECENCY},
    ),
    "strat": WordRow(
        "vllm_kvpolicy.policies.allocators.strat:StratifiedAllocator",
        "blocks of equal length with equal quotas; a control",
        "control, this project",
        options=StratOptions,
        refuses={"streaming": _RECENCY},
    ),
}
