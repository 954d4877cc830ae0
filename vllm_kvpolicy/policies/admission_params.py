"""Options of the admissions.

Called by policies.catalogue. A leaf like the registry.
Process: any
"""

from vllm_kvpolicy.policies.params import Param

WGKV_PARAMS = (
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
