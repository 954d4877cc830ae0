"""The scorers: a row and, where there are any, a model of options for each.

A scorer says how important each token is.
"""

from typing import Literal

from pydantic import Field

from vllm_kvpolicy.policies.catalogue.options import (
    MOST_LAYERS,
    MOST_TOKENS,
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
        128,
        ge=1,
        le=1024,
        description="number of newest queries from which future queries are estimated",
    )
    n_future: int = Field(
        512, ge=1, le=65536, description="number of future positions to average over"
    )
    covariance: bool = Field(True, description="include the covariance of the queries")
    value_norm: bool = Field(
        True, description="multiply the attention by the norm of the value"
    )
    epsilon: float = Field(
        1e-2,
        ge=0,
        le=1_000_000,
        description="constant added to each token's expected attention",
    )


class LagKVOptions(Options):
    """Options of `lagkv`."""

    lag: int = Field(128, ge=2, le=MOST_TOKENS, description="tokens per block")
    cross: bool = Field(
        False,
        description="compare scores across blocks instead of ranking within each block",
    )


class RPCOptions(Options):
    """Options of `rpc`."""

    rpc_window: int = Field(
        32,
        ge=1,
        le=1024,
        description="number of newest queries that score the older tokens",
    )
    rpc_kernel: Odd = Field(
        7, ge=1, le=255, description="width of the average pooling over tokens"
    )


class RKVOptions(Options):
    """Options of `rkv`."""

    rkv_window: int = Field(
        8,
        ge=1,
        le=1024,
        description="number of newest queries that score the older tokens",
    )
    rkv_kernel: Odd = Field(
        7, ge=1, le=255, description="width of the max pooling over tokens"
    )
    rkv_lambda: float = Field(
        0.07, ge=0, le=1, description="weight of attention; redundancy gets the rest"
    )
    rkv_threshold: float = Field(
        0.5,
        ge=0,
        le=1,
        description="cosine similarity above which two keys are similar",
    )


class SnapMaxOptions(Options):
    """Options of `snapmax`."""

    snapmax_window: int = Field(
        256,
        ge=1,
        le=1024,
        description="number of newest queries that score the older tokens",
    )
    snapmax_kernel: Odd = Field(
        5, ge=1, le=255, description="width of the max pooling over tokens"
    )


_CALIBRATION = (
    "the model's query statistics, from `python -m training {}` in a checkout"
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

    seed: int = Field(0, ge=0, le=2**32 - 1, description="random seed of the scores")


class EpiKVOptions(Options):
    """Options of `epikv`."""

    variant: Literal[
        "detrend", "variance", "band", "kv-key", "kv-val", "lag-kv", "segment"
    ] = Field("detrend", description="statistic that scores a token")
    a_first: int = Field(
        -1,
        ge=-1,
        le=MOST_LAYERS,
        description="first layer of band a, whose change raises a "
        "token's score; -1 picks it by depth",
    )
    a_last: int = Field(
        -1,
        ge=-1,
        le=MOST_LAYERS,
        description="last layer of band a; -1 picks it by depth",
    )
    b_first: int = Field(
        -1,
        ge=-1,
        le=MOST_LAYERS,
        description="first layer of band b, whose change lowers a "
        "token's score; -1 picks it by depth",
    )
    b_last: int = Field(
        -1,
        ge=-1,
        le=MOST_LAYERS,
        description="last layer of band b; -1 picks it by depth",
    )
    a_weight: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="weight of band a relative to band b; 0 takes the "
        "variant's default",
    )
    stat_window: int = Field(
        64, ge=2, le=4096, description="number of tokens in the rolling statistics"
    )
    epikv_chunk: int = Field(
        128,
        ge=2,
        le=65536,
        description="tokens per chunk for the variants lag-kv and segment",
    )
    epikv_scores_prompt: bool = Field(
        False,
        description="score prompt tokens that nobody protects as generated ones; "
        "else they rank before those",
    )


SCORERS = {
    "streaming": WordRow(
        "vllm_kvpolicy.policies.scorers.streaming:StreamingScorer",
        "sinks and the newest tokens",
        "StreamingLLM, arXiv 2309.17453",
    ),
    "tova": WordRow(
        "vllm_kvpolicy.policies.scorers.tova:TovaScorer",
        "attention of the newest query, averaged over all heads",
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
    "snapmax": WordRow(
        "vllm_kvpolicy.policies.scorers.snapmax:SnapMaxScorer",
        "largest attention of the newest queries to tokens that may be dropped",
        "WG-KV, arXiv 2512.17452, appendix K.1",
        options=SnapMaxOptions,
        window="snapmax_window",
        weighs_itself=True,
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
        "attention expected from future queries, times the value's norm",
        "Expected Attention, arXiv 2510.00636",
        options=ExpectedOptions,
        window="expected_window",
        weighs_itself=True,
        rotates=True,
    ),
    "keydiff": WordRow(
        "vllm_kvpolicy.policies.scorers.keydiff:KeyDiffScorer",
        "keys least similar to the mean key",
        "KeyDiff, arXiv 2504.15364",
    ),
    "knorm": WordRow(
        "vllm_kvpolicy.policies.scorers.knorm:KnormScorer",
        "keys with the smallest norm",
        "L2 norm, arXiv 2406.11430",
    ),
    "lagkv": WordRow(
        "vllm_kvpolicy.policies.scorers.lagkv:LagKVScorer",
        "keys and values with the largest spread relative to the next block",
        "LagKV, arXiv 2504.04704",
        options=LagKVOptions,
    ),
    "rpc": WordRow(
        "vllm_kvpolicy.policies.scorers.rpc:RPCScorer",
        "pooled attention of the newest queries to older tokens, averaged over all "
        "heads",
        "Reasoning Path Compression, arXiv 2505.13866",
        options=RPCOptions,
        window="rpc_window",
        weighs_itself=True,
        protect_prompt=True,
    ),
    "rkv": WordRow(
        "vllm_kvpolicy.policies.scorers.rkv:RKVScorer",
        "attention of the newest queries, minus similarity to other keys",
        "R-KV, arXiv 2505.24133",
        options=RKVOptions,
        window="rkv_window",
        weighs_itself=True,
    ),
    "triattention": WordRow(
        "vllm_kvpolicy.policies.scorers.triattention:from_options",
        "attention expected from the mean query at future positions",
        "TriAttention, arXiv 2604.04921",
        options=TriAttentionOptions,
        rotates=True,
        startup="vllm_kvpolicy.policies.calibration:TriAttentionStartup",
    ),
    "qfilter": WordRow(
        "vllm_kvpolicy.policies.scorers.qfilter:from_options",
        "keys that point in the direction of typical queries",
        "Q-Filters, arXiv 2503.02812",
        options=QFilterOptions,
        startup="vllm_kvpolicy.policies.calibration:QFilterStartup",
    ),
    "epikv": WordRow(
        "vllm_kvpolicy.policies.scorers.epikv:from_options",
        "change of the hidden state while the token was computed",
        "EpiKV, arXiv 2606.26472",
        options=EpiKVOptions,
        protect_prompt=True,
        measures_tokens=True,
    ),
    "random": WordRow(
        "vllm_kvpolicy.policies.scorers.random:RandomScorer",
        "random scores; a control",
        "control, this project",
        options=RandomOptions,
    ),
}
