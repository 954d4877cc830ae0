"""The admissions: a row and, where there are any, a model of options for each.

An admission says which tokens may stay in the cache once they leave the recent window.
"""

from pydantic import Field

from vllm_kvpolicy.policies.catalogue.options import Options, Path
from vllm_kvpolicy.policies.catalogue.rows import WordRow


class ExactOptions(Options):
    """Options of admissions that can decide while tokens are computed."""

    exact: bool = Field(
        False,
        description="mask a dropped token as soon as it leaves the window, not at the "
        "next event; uses attention kernels of its own, slower",
    )


class WGKVOptions(ExactOptions):
    """Options of `wgkv`."""

    wgkv_gates: Path = Field(
        description="the model's write gates, released by the authors (.pt) or made by "
        "`python -m vllm_kvpolicy.train.wgkv` (.safetensors)"
    )
    wgkv_threshold: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="tokens with a gate above this are admitted; by default what the "
        "file says, 0.1 in released ones",
    )


class DMSOptions(ExactOptions):
    """Options of `dms`."""

    dms_adapter: Path | None = Field(
        None,
        description="decisions of a model that makes none itself, made by `python -m "
        "vllm_kvpolicy.train.dms` (.safetensors), or a checkpoint folder with "
        "dms_proj_alpha tensors",
    )
    dms_window: int | None = Field(
        None,
        ge=1,
        description="tokens before each query that it always sees; by default what the "
        "model or the adapter says",
    )
    dms_channel: int | None = Field(
        None,
        ge=-1024,
        description="channel of a query that decides, counted from the end if "
        "negative; by default the last",
    )
    dms_shift: int | None = Field(
        None,
        ge=0,
        le=1,
        description="a token decides on the one this many places before it; by default "
        "1, and 0 for models with dms_metadata.json",
    )
    dms_zero_after_rope: bool | None = Field(
        None,
        description="also zero the deciding channel after RoPE; by default true, and "
        "false for models with dms_metadata.json",
    )


class DuoOptions(Options):
    """Options of `duo`."""

    duo_pattern: Path = Field(
        description="how much each head profits from a full cache, a folder with "
        "full_attention_heads.tsv and config.json"
    )
    duo_sparsity: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the heads, those that profit least, that keep only the "
        "recent window",
    )


_HELD = "its shares count tokens that are held, not those that are admitted"
_UNSHARED = {
    "adakv": _HELD,
    "pyramid": _HELD,
    "hard": _HELD,
    "strat": _HELD,
    "chunk": "a chunk with a refused token in it has no score",
}
ADMISSIONS = {
    "wgkv": WordRow(
        "vllm_kvpolicy.policies.admissions.wgkv.policy:from_options",
        "trained gates choose which tokens stay when they leave the recent window",
        "WG-KV, arXiv 2512.17452",
        options=WGKVOptions,
        ragged=True,
        refuses=_UNSHARED,
        startup="vllm_kvpolicy.policies.admissions.wgkv.startup:WGKVStartup",
    ),
    "dms": WordRow(
        "vllm_kvpolicy.policies.admissions.dms.policy:from_options",
        "a model trained for it says which tokens are dropped after the recent window",
        "DMS, arXiv 2506.05345",
        options=DMSOptions,
        ragged=True,
        decides=True,
        decides_later=True,
        refuses=_UNSHARED,
        startup="vllm_kvpolicy.policies.admissions.dms.startup:DMSStartup",
        architectures={
            "Qwen3ForCausalLMDMS": (
                "vllm_kvpolicy.policies.admissions.dms.checkpoint:Qwen3ForCausalLMDMS"
            ),
        },
    ),
    "duo": WordRow(
        "vllm_kvpolicy.policies.admissions.duo.policy:from_options",
        "heads of a pattern keep everything, the others the recent window, a baseline",
        "DuoAttention, arXiv 2410.10819",
        options=DuoOptions,
        ragged=True,
        refuses=_UNSHARED,
        startup="vllm_kvpolicy.policies.admissions.duo.startup:DuoStartup",
    ),
    "local": WordRow(
        "vllm_kvpolicy.policies.admissions.local:LocalAttention",
        "only sinks and the recent window stay, a baseline",
        "WG-KV, arXiv 2512.17452",
        ragged=True,
        refuses=dict.fromkeys(("", "ams", *_UNSHARED), "it leaves no choice"),
    ),
}
