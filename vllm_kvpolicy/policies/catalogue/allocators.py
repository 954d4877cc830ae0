"""The allocators: a row and, where there are any, a model of options for each.

An allocator says how the budget is shared among layers, heads and regions.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from vllm_kvpolicy.policies.catalogue.options import (
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
        "default", description="named set of values for the keys that are not given"
    )
    segment_mass: float = Field(
        0.1, ge=0.001, lt=1, description="attention mass of a segment"
    )
    min_segment: int = Field(
        16, ge=1, description="shorter segments are merged, tokens"
    )
    max_segment: Annotated[int, AfterValidator(AtLeast("min_segment"))] = Field(
        256, ge=1, description="longer segments are split, tokens"
    )
    min_quota: int = Field(1, ge=0, description="smallest quota of a segment, tokens")
    ema_decay: float = Field(
        0.9, ge=0, lt=1, description="share of the old credit that survives an event"
    )
    ema_mix: float = Field(
        0.9,
        ge=0,
        le=1,
        description="share of the current mass; 1 for no average over events",
    )
    quotas: Literal["mass", "uniform"] = Field(
        "mass", description="segments share the budget by mass, or equally"
    )
    segments: Literal["mass", "fixed"] = Field(
        "mass", description="cut by mass, or into blocks of `fixed_segment`"
    )
    fixed_segment: int = Field(
        128, ge=1, description="block length where segments are `fixed`, tokens"
    )
    suffix_pad: Literal["max", "mean", "none"] = Field(
        "max", description="mass given to each of the newest `window` tokens"
    )
    parity: bool = Field(False, description="follow the authors' code literally")


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
        0.2, ge=0, le=1, description="share of the budget that each head has to itself"
    )


class PyramidOptions(Options):
    """Options of `pyramid`."""

    pyramid_beta: float = Field(
        20.0, ge=1, description="the budget divided by that of the last layer"
    )
    pyramid_headroom: int = Field(
        512,
        ge=0,
        description="tokens that the first layer may hold beyond the budget, if that "
        "many are held",
    )


class ChunkOptions(Options):
    """Options of `chunk`."""

    chunk_length: int = Field(20, ge=1, description="tokens per chunk")


class StratOptions(Options):
    """Options of `strat`."""

    strat_block: int = Field(256, ge=1, description="tokens per block")


class HardOptions(WindowOptions):
    """Options of `hard`."""

    hard_p: float = Field(
        0.9, ge=0.01, le=1, description="attention mass of a nucleus (top-p)"
    )
    hard_lower: float = Field(
        0.25, ge=0, le=1, description="smallest size of a head, in budgets"
    )
    hard_upper: float = Field(
        4.0, ge=1, description="largest size of a head, in budgets"
    )
    hard_order: Literal["method", "attention"] = Field(
        "method",
        description="the order of a nucleus: the scorer's, or each query's attention",
    )
    hard_mode: Literal["fixed", "dynamic"] = Field(
        "fixed", description="spend the whole budget, or no more than the nuclei need"
    )
    hard_scope: Literal["model", "layer"] = Field(
        "model", description="heads that share a budget: all, or those of one layer"
    )
    hard_merge: bool = Field(False, description="merge dropped tokens into survivors")


_RECENCY = "recency says nothing about importance inside a region or a head"
_ALIKE = "its scores are the same for all KV heads, which share the budget by them"
_SPREAD = "its scores spread alike in all KV heads, which share the budget by them"
_WITHIN = (
    "its scores are ranks or shares within blocks of one KV head, and heads share the "
    "budget by comparing them"
)
# The empty word is the allocator of a name without one.
ALLOCATORS = {
    "": WordRow(
        "vllm_kvpolicy.policies.allocators.uniform:UniformTopK",
        "best tokens of each head",
        "kvpress 0.4.0, ScorerPress",
    ),
    "ams": WordRow(
        "vllm_kvpolicy.policies.allocators.ams:AMSAllocator",
        "segments of equal attention mass, each with its quota",
        "AMS, arXiv 2605.23200",
        options=AMSOptions,
        window="window",
        presets=AMS_PRESETS,
        refuses={"streaming": _RECENCY},
    ),
    "adakv": WordRow(
        "vllm_kvpolicy.policies.allocators.adakv:AdaKVAllocator",
        "best tokens of each layer, whichever heads they belong to",
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
        "budgets that fall with depth",
        "PyramidKV, arXiv 2406.02069",
        options=PyramidOptions,
        ragged=True,
    ),
    "chunk": WordRow(
        "vllm_kvpolicy.policies.allocators.chunk:ChunkAllocator",
        "best chunks of neighbours, the same in all heads of a layer",
        "ChunkKV, arXiv 2502.00299",
        options=ChunkOptions,
        refuses={"streaming": _RECENCY},
    ),
    "hard": WordRow(
        "vllm_kvpolicy.policies.allocators.hard:HardAllocator",
        "heads sized by how many keys hold most of their attention",
        "Hard-KV",
        options=HardOptions,
        window="window",
        ragged=True,
        refuses={"streaming": _RECENCY},
    ),
    "strat": WordRow(
        "vllm_kvpolicy.policies.allocators.strat:StratifiedAllocator",
        "blocks of equal length with equal quotas, a control",
        "control of this project",
        options=StratOptions,
        refuses={"streaming": _RECENCY},
    ),
}
