"""Options of the scorers; see `policies.catalogue.options` for what a `Param` says.

Read by policies.catalogue.words. A leaf like the registry: it imports only the standard
library.
"""

from vllm_kvpolicy.policies.catalogue.options import Param

EXPECTED_PARAMS = (
    Param(
        "expected_window",
        "int",
        128,
        "queries that stand for future ones, tokens",
        1,
        maximum=1024,
    ),
    Param("n_future", "int", 512, "future positions averaged over", 1, 65536),
    Param("covariance", "bool", True, "count how much queries differ, too"),
    Param("value_norm", "bool", True, "weight attention by the length of the value"),
    Param("epsilon", "float", 1e-2, "attention added to each token's"),
)
LAGKV_PARAMS = (
    Param("lag", "int", 128, "tokens per block", 2),
    Param("cross", "bool", False, "compare scores across blocks, no ranks within"),
)
RPC_PARAMS = (
    Param(
        "rpc_window",
        "int",
        32,
        "queries that score the older tokens, tokens",
        1,
        maximum=1024,
    ),
    Param("rpc_kernel", "int", 7, "neighbours averaged over, tokens", 1, 255, odd=True),
)
SEED = Param("seed", "int", 0, "another seed draws other scores", 0, 2**32 - 1)
RKV_PARAMS = (
    Param(
        "rkv_window", "int", 8, "queries that score the older tokens", 1, maximum=1024
    ),
    Param("rkv_kernel", "int", 7, "neighbours whose maximum counts", 1, 255, odd=True),
    Param("rkv_lambda", "float", 0.07, "weight of attention, not of redundancy", 0, 1),
    Param("rkv_threshold", "float", 0.5, "cosine above which keys are similar", 0, 1),
)


def _calibration(scorer: str) -> Param:
    return Param(
        f"{scorer}_calibration",
        "path",
        None,
        "the model's query statistics, made by `python -m vllm_kvpolicy.calibrate`",
        required=True,
        holds=scorer,
    )


TRIATTENTION_CALIBRATION = _calibration("triattention")
QFILTER_CALIBRATION = _calibration("qfilter")
TRI_AGGREGATE = Param(
    "tri_aggregate",
    "choice",
    "max",
    "which of its query heads a KV head listens to",
    choices=("max", "mean"),
)
EPIKV_VARIANTS = (
    "detrend",
    "variance",
    "band",
    "kv-key",
    "kv-val",
    "lag-kv",
    "segment",
)
EPIKV_PARAMS = (
    Param(
        "variant",
        "choice",
        "detrend",
        "what a token is scored by",
        choices=EPIKV_VARIANTS,
    ),
    Param("a_first", "int", -1, "first layer that counts for it, -1: by depth", -1),
    Param("a_last", "int", -1, "last layer that counts for it, -1: by depth", -1),
    Param("b_first", "int", -1, "first layer that counts against it, -1: by depth", -1),
    Param("b_last", "int", -1, "last layer that counts against it, -1: by depth", -1),
    Param("a_weight", "float", 0, "weight of layers a to 1 of b, 0: the variant's"),
    Param("stat_window", "int", 64, "tokens in the rolling statistics", 2, 4096),
    Param("epikv_chunk", "int", 128, "tokens per chunk of lag-kv or segment", 2, 65536),
)
