"""The scorers: a row and, where there are any, a model of options for each.

A scorer says how important each token is.
"""

from typing import Literal

from pydantic import Field

from vllm_kvpolicy.policies.catalogue.options import (
    Odd,
    Options,
    Path,
    PoolOptions,
    WindowOptions,
)
from vllm_kvpolicy.policies.catalogue.rows import WordRow


class ExpectedOptions(Options):
    """Options of `expected`."""

    expected_window: int = Field(
        128, ge=1, le=1024, description="newest queries that stand for future ones"
    )
    n_future: int = Field(
        512, ge=1, le=65536, description="future positions averaged over"
    )
    covariance: bool = Field(
        True, description="also count how much the queries differ from each other"
    )
    value_norm: bool = Field(
        True, description="multiply the attention by the length of the value"
    )
    epsilon: float = Field(
        1e-2, ge=0, description="added to each token's expected attention"
    )


class LagKVOptions(Options):
    """Options of `lagkv`."""

    lag: int = Field(128, ge=2, description="tokens per block")
    cross: bool = Field(
        False, description="compare scores across blocks instead of ranking in each"
    )


class RPCOptions(Options):
    """Options of `rpc`."""

    rpc_window: int = Field(
        32, ge=1, le=1024, description="newest queries, which score the older tokens"
    )
    rpc_kernel: Odd = Field(
        7, ge=1, le=255, description="neighbours averaged over, tokens"
    )


class RKVOptions(Options):
    """Options of `rkv`."""

    rkv_window: int = Field(
        8, ge=1, le=1024, description="newest queries, which score the older tokens"
    )
    rkv_kernel: Odd = Field(
        7, ge=1, le=255, description="neighbours whose maximum counts, tokens"
    )
    rkv_lambda: float = Field(
        0.07, ge=0, le=1, description="weight of attention; the rest is redundancy's"
    )
    rkv_threshold: float = Field(
        0.5, ge=0, le=1, description="cosine above which two keys are similar"
    )


_CALIBRATION = (
    "the model's query statistics, from `python -m vllm_kvpolicy.calibrate {}`"
)


class TriAttentionOptions(Options):
    """Options of `triattention`."""

    triattention_calibration: Path = Field(
        description=_CALIBRATION.format("triattention")
    )
    tri_aggregate: Literal["max", "mean"] = Field(
        "max", description="how the query heads of a KV head are combined"
    )


class QFilterOptions(Options):
    """Options of `qfilter`."""

    qfilter_calibration: Path = Field(description=_CALIBRATION.format("qfilter"))


class RandomOptions(Options):
    """Options of `random`."""

    seed: int = Field(
        0, ge=0, le=2**32 - 1, description="a different seed draws different scores"
    )


class EpiKVOptions(Options):
    """Options of `epikv`."""

    variant: Literal[
        "detrend", "variance", "band", "kv-key", "kv-val", "lag-kv", "segment"
    ] = Field("detrend", description="what a token is scored by")
    a_first: int = Field(
        -1, ge=-1, description="first layer that counts for a token, -1: by depth"
    )
    a_last: int = Field(
        -1, ge=-1, description="last layer that counts for a token, -1: by depth"
    )
    b_first: int = Field(
        -1, ge=-1, description="first layer that counts against a token, -1: by depth"
    )
    b_last: int = Field(
        -1, ge=-1, description="last layer that counts against a token, -1: by depth"
    )
    a_weight: float = Field(
        0.0, ge=0, description="weight of layers a to 1 of layers b, 0: the variant's"
    )
    stat_window: int = Field(
        64, ge=2, le=4096, description="tokens in the rolling statistics"
    )
    epikv_chunk: int = Field(
        128, ge=2, le=65536, description="tokens per chunk, for lag-kv and segment"
    )


SCORERS = {
    "streaming": WordRow(
        "vllm_kvpolicy.policies.scorers.streaming:StreamingScorer",
        "sinks and the newest tokens",
        "StreamingLLM, arXiv 2309.17453",
    ),
    "tova": WordRow(
        "vllm_kvpolicy.policies.scorers.tova:TovaScorer",
        "attention of the newest query, mean over all heads",
        "TOVA, arXiv 2401.06104",
        window=1,
    ),
    "snapkv": WordRow(
        "vllm_kvpolicy.policies.scorers.snapkv:SnapKVScorer",
        "pooled attention of the newest queries",
        "SnapKV, arXiv 2404.14469",
        options=PoolOptions,
        window="window",
    ),
    "h2o": WordRow(
        "vllm_kvpolicy.policies.scorers.h2o:H2OScorer",
        "attention received so far, summed over the query windows",
        "H2O, arXiv 2306.14048",
        options=WindowOptions,
        window="window",
    ),
    "expected": WordRow(
        "vllm_kvpolicy.policies.scorers.expected:ExpectedAttentionScorer",
        "attention expected from future queries, times the value's length",
        "Expected Attention, arXiv 2510.00636",
        options=ExpectedOptions,
        window="expected_window",
    ),
    "keydiff": WordRow(
        "vllm_kvpolicy.policies.scorers.keydiff:KeyDiffScorer",
        "keys least like the mean key",
        "KeyDiff, arXiv 2504.15364",
    ),
    "knorm": WordRow(
        "vllm_kvpolicy.policies.scorers.knorm:KnormScorer",
        "shortest keys",
        "L2 norm, arXiv 2406.11430",
    ),
    "lagkv": WordRow(
        "vllm_kvpolicy.policies.scorers.lagkv:LagKVScorer",
        "keys and values that spread most, as seen from the next block",
        "LagKV, arXiv 2504.04704",
        options=LagKVOptions,
    ),
    "rpc": WordRow(
        "vllm_kvpolicy.policies.scorers.rpc:RPCScorer",
        "pooled attention of the newest queries to older tokens, mean over all heads",
        "Reasoning Path Compression, arXiv 2505.13866",
        options=RPCOptions,
        window="rpc_window",
        protect_prompt=True,
    ),
    "rkv": WordRow(
        "vllm_kvpolicy.policies.scorers.rkv:RKVScorer",
        "attention of the newest queries, minus similarity to other keys",
        "R-KV, arXiv 2505.24133",
        options=RKVOptions,
        window="rkv_window",
    ),
    "triattention": WordRow(
        "vllm_kvpolicy.policies.scorers.triattention:from_options",
        "attention expected from the mean query at future positions",
        "TriAttention, arXiv 2604.04921",
        options=TriAttentionOptions,
        startup="vllm_kvpolicy.policies.calibration:TriAttentionStartup",
    ),
    "qfilter": WordRow(
        "vllm_kvpolicy.policies.scorers.qfilter:from_options",
        "keys along the direction of typical queries",
        "Q-Filters, arXiv 2503.02812",
        options=QFilterOptions,
        startup="vllm_kvpolicy.policies.calibration:QFilterStartup",
    ),
    "epikv": WordRow(
        "vllm_kvpolicy.policies.scorers.epikv:from_options",
        "steps of the hidden state when the token was computed",
        "EpiKV, arXiv 2606.26472",
        options=EpiKVOptions,
        protect_prompt=True,
        measures_tokens=True,
    ),
    "random": WordRow(
        "vllm_kvpolicy.policies.scorers.random:RandomScorer",
        "drawn at random, a control",
        "control of this project",
        options=RandomOptions,
    ),
}
