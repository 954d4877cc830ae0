"""The catalogue: one row per admission, scorer, allocator, selection, test policy.

Help texts, the documentation, refusals and tests follow from
these rows. A leaf like the registry: it imports only the standard library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_kvpolicy.policies.catalogue.admissions import (
    DMS_PARAMS,
    DUO_PARAMS,
    WGKV_PARAMS,
)
from vllm_kvpolicy.policies.catalogue.allocators import (
    ADAKV_PARAMS,
    CHUNK_PARAMS,
    HARD_PARAMS,
    PYRAMID_PARAMS,
    STRAT_PARAMS,
)
from vllm_kvpolicy.policies.catalogue.options import (
    AMS_PARAMS,
    AMS_PRESETS,
    POOL_KERNEL,
    RAGGED,
    WINDOW,
    Options,
    Param,
)
from vllm_kvpolicy.policies.catalogue.scorers import (
    EPIKV_PARAMS,
    EXPECTED_PARAMS,
    LAGKV_PARAMS,
    QFILTER_CALIBRATION,
    RKV_PARAMS,
    RPC_PARAMS,
    SEED,
    TRI_AGGREGATE,
    TRIATTENTION_CALIBRATION,
)
from vllm_kvpolicy.policies.catalogue.selections import QUEST_PARAMS


@dataclass(frozen=True)
class Word:
    """An admission, a scorer, an allocator or a selection: one word of the grammar.

    Args:
        path: "module:class" of its implementation.
        summary: half a line for help texts.
        source: where the method is published.
        window_tokens: queries it reads unless an option says otherwise.
        window_key: the option that says otherwise, None if none does.
        ragged: heads end up with different numbers of tokens.
        protect_prompt: prompt tokens are kept unless the user says otherwise.
        params: options it reads.
        presets: option values by preset name.
        refuses: words it is not combined with, and why.
        placement: where survivors go; a name in block_manager.placement.
    """

    path: str
    summary: str
    source: str
    window_tokens: int = 0
    window_key: str | None = None
    ragged: bool = False
    protect_prompt: bool = False
    params: tuple[Param, ...] = ()
    presets: Mapping[str, Options] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    placement: str = "in_place"


_HELD = "its shares count tokens that are held, not those that are admitted"
_UNSHARED = {
    "adakv": _HELD,
    "pyramid": _HELD,
    "hard": _HELD,
    "strat": _HELD,
    "chunk": "a chunk with a refused token in it has no score",
}
ADMISSIONS = {
    "wgkv": Word(
        "vllm_kvpolicy.policies.admissions.wgkv.policy:WriteGates",
        "trained gates admit tokens to the cache behind the recent window",
        "WG-KV, arXiv 2512.17452",
        ragged=True,
        params=WGKV_PARAMS,
        refuses=_UNSHARED,
    ),
    "dms": Word(
        "vllm_kvpolicy.policies.admissions.dms.policy:DelayedEviction",
        "a model trained for it says which tokens leave the cache behind the window",
        "DMS, arXiv 2506.05345",
        ragged=True,
        params=DMS_PARAMS,
        refuses=_UNSHARED,
    ),
    "duo": Word(
        "vllm_kvpolicy.policies.admissions.duo.policy:RetrievalHeads",
        "heads of a pattern keep everything, the others the recent window, a baseline",
        "DuoAttention, arXiv 2410.10819",
        ragged=True,
        params=DUO_PARAMS,
        refuses=_UNSHARED,
    ),
    "local": Word(
        "vllm_kvpolicy.policies.admissions.local:LocalAttention",
        "nothing is admitted behind the recent window but sinks, a baseline",
        "WG-KV, arXiv 2512.17452",
        ragged=True,
        refuses=dict.fromkeys(("", "ams", *_UNSHARED), "it leaves no choice"),
    ),
}
SCORERS = {
    "streaming": Word(
        "vllm_kvpolicy.policies.scorers.streaming:StreamingScorer",
        "sinks and the newest tokens",
        "StreamingLLM, arXiv 2309.17453",
    ),
    "tova": Word(
        "vllm_kvpolicy.policies.scorers.tova:TovaScorer",
        "attention of the newest query, mean over all heads",
        "TOVA, arXiv 2401.06104",
        window_tokens=1,
    ),
    "snapkv": Word(
        "vllm_kvpolicy.policies.scorers.snapkv:SnapKVScorer",
        "pooled attention of the newest queries",
        "SnapKV, arXiv 2404.14469",
        window_tokens=32,
        window_key="window",
        params=(WINDOW, POOL_KERNEL),
    ),
    "h2o": Word(
        "vllm_kvpolicy.policies.scorers.h2o:H2OScorer",
        "attention received so far, summed over the windows",
        "H2O, arXiv 2306.14048",
        window_tokens=32,
        window_key="window",
        params=(WINDOW,),
    ),
    "expected": Word(
        "vllm_kvpolicy.policies.scorers.expected:ExpectedAttentionScorer",
        "attention expected from future queries, times the value's length",
        "Expected Attention, arXiv 2510.00636",
        window_tokens=128,
        window_key="expected_window",
        params=EXPECTED_PARAMS,
    ),
    "keydiff": Word(
        "vllm_kvpolicy.policies.scorers.keydiff:KeyDiffScorer",
        "keys least like the mean key",
        "KeyDiff, arXiv 2504.15364",
    ),
    "knorm": Word(
        "vllm_kvpolicy.policies.scorers.knorm:KnormScorer",
        "shortest keys",
        "L2 norm, arXiv 2406.11430",
    ),
    "lagkv": Word(
        "vllm_kvpolicy.policies.scorers.lagkv:LagKVScorer",
        "keys and values that spread most, seen from the next block",
        "LagKV, arXiv 2504.04704",
        params=LAGKV_PARAMS,
    ),
    "rpc": Word(
        "vllm_kvpolicy.policies.scorers.rpc:RPCScorer",
        "pooled attention of the newest queries to older tokens, mean over all heads",
        "Reasoning Path Compression, arXiv 2505.13866",
        window_tokens=32,
        window_key="rpc_window",
        protect_prompt=True,
        params=RPC_PARAMS,
    ),
    "rkv": Word(
        "vllm_kvpolicy.policies.scorers.rkv:RKVScorer",
        "attention of the newest queries, less likeness to other keys",
        "R-KV, arXiv 2505.24133",
        window_tokens=8,
        window_key="rkv_window",
        params=RKV_PARAMS,
    ),
    "triattention": Word(
        "vllm_kvpolicy.policies.scorers.triattention:TriAttentionScorer",
        "attention expected from the mean query at positions to come",
        "TriAttention, arXiv 2604.04921",
        params=(TRIATTENTION_CALIBRATION, TRI_AGGREGATE),
    ),
    "qfilter": Word(
        "vllm_kvpolicy.policies.scorers.qfilter:QFilterScorer",
        "keys along the direction of typical queries",
        "Q-Filters, arXiv 2503.02812",
        params=(QFILTER_CALIBRATION,),
    ),
    "epikv": Word(
        "vllm_kvpolicy.policies.scorers.epikv:EpiKVScorer",
        "steps of the hidden state when the token was computed",
        "EpiKV, arXiv 2606.26472",
        protect_prompt=True,
        params=EPIKV_PARAMS,
    ),
    "random": Word(
        "vllm_kvpolicy.policies.scorers.random:RandomScorer",
        "drawn at random, a control",
        "control of this project",
        params=(SEED,),
    ),
}

_RECENCY = "recency says nothing about importance inside a region or a head"
_ALIKE = "its scores are the same for all KV heads, which share the budget by them"
_SPREAD = "its scores spread alike in all KV heads, which share the budget by them"
_WITHIN = (
    "its scores are ranks or shares within blocks of one KV head, and heads share the "
    "budget by comparing them"
)
# The empty word is the allocator of a name without one.
ALLOCATORS = {
    "": Word(
        "vllm_kvpolicy.policies.allocators.uniform:UniformTopK",
        "best tokens of each head",
        "kvpress 0.4.0, ScorerPress",
    ),
    "ams": Word(
        "vllm_kvpolicy.policies.allocators.ams:AMSAllocator",
        "segments of equal attention mass, each with its quota",
        "AMS, arXiv 2605.23200",
        window_tokens=32,
        window_key="window",
        params=AMS_PARAMS,
        presets=AMS_PRESETS,
        refuses={"streaming": _RECENCY},
    ),
    "adakv": Word(
        "vllm_kvpolicy.policies.allocators.adakv:AdaKVAllocator",
        "best tokens of each layer, whichever heads they belong to",
        "Ada-KV, arXiv 2407.11550",
        ragged=True,
        params=ADAKV_PARAMS,
        refuses={
            "streaming": _ALIKE,
            "tova": _ALIKE,
            "rpc": _ALIKE,
            "epikv": _ALIKE,
            "lagkv": _WITHIN,
            "random": _SPREAD,
        },
    ),
    "pyramid": Word(
        "vllm_kvpolicy.policies.allocators.pyramid:PyramidAllocator",
        "budgets that fall with depth",
        "PyramidKV, arXiv 2406.02069",
        ragged=True,
        params=PYRAMID_PARAMS,
    ),
    "chunk": Word(
        "vllm_kvpolicy.policies.allocators.chunk:ChunkAllocator",
        "best chunks of neighbours, the same in all heads of a layer",
        "ChunkKV, arXiv 2502.00299",
        params=CHUNK_PARAMS,
        refuses={"streaming": _RECENCY},
    ),
    "hard": Word(
        "vllm_kvpolicy.policies.allocators.hard:HardAllocator",
        "heads sized by how many keys hold most of their attention",
        "Hard-KV",
        window_tokens=32,
        window_key="window",
        ragged=True,
        params=HARD_PARAMS,
        refuses={"streaming": _RECENCY},
    ),
    "strat": Word(
        "vllm_kvpolicy.policies.allocators.strat:StratifiedAllocator",
        "blocks of equal length with equal quotas, a control",
        "control of this project",
        params=STRAT_PARAMS,
        refuses={"streaming": _RECENCY},
    ),
}
SELECTIONS = {
    "quest": Word(
        "vllm_kvpolicy.policies.selections.quest:Quest",
        "each generated token reads the pages whose keys may match its query best",
        "Quest, arXiv 2406.10774",
        ragged=True,
        params=QUEST_PARAMS,
    ),
}
# The policy of a name that is a selection alone.
KEEP_ALL = Word(
    "vllm_kvpolicy.policies.keep_all:KeepAll",
    "keeps everything",
    "this project",
)
TEST_POLICIES = {
    "identity": Word(
        "vllm_kvpolicy.policies.testing:MovementPolicy",
        "keeps everything, shuffles tokens at each event",
        "test policy of this project",
        params=(RAGGED,),
        placement="shuffled",
    ),
    "holes": Word(
        "vllm_kvpolicy.policies.testing:MovementPolicy",
        "keeps everything, gives back and takes again freed pages",
        "test policy of this project",
        params=(RAGGED,),
        placement="exchanged",
    ),
}
