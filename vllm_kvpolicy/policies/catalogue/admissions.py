"""Options of the admissions."""

from vllm_kvpolicy.policies.catalogue.options import Param

EXACT = Param(
    "exact",
    "bool",
    False,
    "tokens that are not kept are hidden as soon as they leave the window, not at the "
    "next event; attention of its own, slower",
)
WGKV_PARAMS = (
    EXACT,
    Param(
        "wgkv_gates",
        "path",
        None,
        "the model's write gates, released by the authors (.pt) or made by `python -m "
        "vllm_kvpolicy.train.wgkv` (.safetensors)",
        required=True,
        holds="wgkv",
    ),
    Param(
        "wgkv_threshold",
        "float",
        None,
        "tokens with a gate above this are admitted; by default what the file says, "
        "0.1 in released ones",
        0,
        1,
        open_end=True,
        optional=True,
    ),
)
DMS_PARAMS = (
    EXACT,
    Param(
        "dms_adapter",
        "path",
        None,
        "decisions of a model that makes none itself, made by `python -m "
        "vllm_kvpolicy.train.dms` (.safetensors), or a checkpoint folder with "
        "dms_proj_alpha tensors",
        holds="dms",
    ),
    Param(
        "dms_window",
        "int",
        None,
        "tokens behind each query that are always seen; by default what the model or "
        "the adapter says",
        1,
        optional=True,
    ),
    Param(
        "dms_channel",
        "int",
        None,
        "channel of a query that decides, from the end if negative; by default the "
        "last",
        -1024,
        optional=True,
    ),
    Param(
        "dms_shift",
        "int",
        None,
        "a token decides on the one so many places before it; by default 1, and 0 for "
        "models with dms_metadata.json",
        0,
        1,
        optional=True,
    ),
    Param(
        "dms_zero_after_rope",
        "bool",
        None,
        "hide the deciding channel behind the rotation, too; by default true, and "
        "false for models with dms_metadata.json",
        optional=True,
    ),
)
DUO_PARAMS = (
    Param(
        "duo_pattern",
        "path",
        None,
        "of how much use a full cache is to each head, a folder with "
        "full_attention_heads.tsv and config.json",
        required=True,
        holds="duo",
    ),
    Param(
        "duo_sparsity",
        "float",
        0.5,
        "share of the heads, those of least use, that keep the recent window alone",
        0,
        1,
    ),
)
