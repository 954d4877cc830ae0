"""Options of the allocators but AMS: their ranges and defaults.

Read by policies.catalogue.words. A leaf like the registry: it imports only the standard
library.
"""

from vllm_kvpolicy.policies.catalogue.options import WINDOW, Param

ADAKV_PARAMS = (
    Param(
        "adakv_floor",
        "float",
        0.2,
        "share of the budget that each head has to itself",
        0,
        1,
    ),
)
PYRAMID_PARAMS = (
    Param("pyramid_beta", "float", 20.0, "budget over that of the last layer", 1),
    Param(
        "pyramid_headroom",
        "int",
        512,
        "tokens that the first layer may hold beyond the budget, if so many are held",
    ),
)
CHUNK_PARAMS = (Param("chunk_length", "int", 20, "tokens per chunk", 1),)
STRAT_PARAMS = (Param("strat_block", "int", 256, "tokens per block", 1),)
HARD_PARAMS = (
    WINDOW,
    Param("hard_p", "float", 0.9, "attention mass of a nucleus", 0.01, 1),
    Param("hard_lower", "float", 0.25, "least share of the budget for a head", 0, 1),
    Param("hard_upper", "float", 4.0, "most of the budget for a head, times", 1),
    Param(
        "hard_order",
        "choice",
        "method",
        "whose order the nuclei follow: the scorer's, or each query's own attention",
        choices=("method", "attention"),
    ),
    Param(
        "hard_mode",
        "choice",
        "fixed",
        "spend the whole budget, or no more than the nuclei",
        choices=("fixed", "dynamic"),
    ),
    Param(
        "hard_scope",
        "choice",
        "model",
        "heads that share a budget: those of all layers, or of one",
        choices=("model", "layer"),
    ),
    Param("hard_merge", "bool", False, "merge dropped tokens into survivors"),
)
