"""The admissions: a row and, where there are any, a model of options for each.

An admission says which tokens may stay in the cache once they leave the recent window.
"""

from pydantic import Field

from vllm_kvpolicy.policies.catalogue.allocators import ALLOCATORS
from vllm_kvpolicy.policies.catalogue.options import MOST_TOKENS, Options, Path
from vllm_kvpolicy.policies.catalogue.rows import WordRow


class ExactOptions(Options):
    """Options of admissions that can decide while tokens are computed."""

    exact: bool = Field(
        False,
        description="mask a dropped token as soon as it leaves the window instead "
        "of at the next event; uses slower attention kernels",
    )


class WGKVOptions(ExactOptions):
    """Options of `wgkv`."""

    wgkv_gates: Path = Field(
        description="the model's write gates: the authors' release (.pt), or from "
        "`python -m training wgkv` in a checkout (.safetensors)"
    )
    wgkv_threshold: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="tokens with a gate above this are admitted; by default the "
        "file's value, 0.1 for released gates",
    )


class DMSOptions(ExactOptions):
    """Options of `dms`."""

    dms_adapter: Path | None = Field(
        None,
        description="adapter for a model without DMS decisions of its own: from "
        "`python -m training dms` in a checkout (.safetensors), or a checkpoint "
        "folder with dms_proj_alpha tensors",
    )
    dms_window: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="number of preceding tokens that a query always sees; by "
        "default that of the model or the adapter",
    )
    dms_channel: int | None = Field(
        None,
        ge=-1024,
        le=1023,
        description="query channel that holds the decision, negative values count "
        "from the end; by default the last",
    )
    dms_shift: int | None = Field(
        None,
        ge=0,
        le=1,
        description="a token decides about the token this many positions before it; "
        "by default 1, and 0 for models with dms_metadata.json",
    )
    dms_zero_after_rope: bool | None = Field(
        None,
        description="also set the decision channel to zero after RoPE; by default "
        "true, and false for models with dms_metadata.json",
    )


class KVzapOptions(ExactOptions):
    """Options of `kvzap`."""

    kvzap_model: Path = Field(
        description="the model's surrogate as NVIDIA releases them, KVzap-mlp-MODEL or "
        "KVzap-linear-MODEL: a folder with config.json and model.safetensors, or a "
        "name on the hub that has been downloaded"
    )
    kvzap_threshold: float = Field(
        -4.0,
        ge=-1_000_000,
        le=1_000_000,
        description="tokens with a score below this are dropped; scores are natural "
        "logarithms",
    )


class DuoOptions(Options):
    """Options of `duo`."""

    duo_pattern: Path = Field(
        description="folder with full_attention_heads.tsv and config.json, which "
        "say how much each head needs the full KV cache"
    )
    duo_sparsity: float = Field(
        0.5,
        ge=0,
        le=1,
        description="fraction of heads that keep only sinks and the recent window, "
        "those that need the full KV cache least",
    )


_HELD = (
    "the allocator sizes heads by the tokens held, not by the tokens admitted; `trim` "
    "sizes them by the latter"
)
_UNSHARED = {
    "adakv": _HELD,
    "pyramid": _HELD,
    "hard": _HELD,
    "strat": _HELD,
    "chunk": "a chunk that contains a token refused by the admission has no score",
}
_NO_CHOICE = "`local` keeps only sinks and the recent window: nothing is left to choose"
ADMISSIONS = {
    "wgkv": WordRow(
        "vllm_kvpolicy.policies.admissions.wgkv.policy:from_options",
        "trained gates choose which tokens stay when they leave the recent window",
        "WG-KV, arXiv 2512.17452",
        options=WGKVOptions,
        ragged=True,
        rotates=True,
        refuses=_UNSHARED,
        startup="vllm_kvpolicy.policies.admissions.wgkv.startup:WGKVStartup",
    ),
    "dms": WordRow(
        "vllm_kvpolicy.policies.admissions.dms.policy:from_options",
        "the model is trained to mark which tokens are dropped after the recent window",
        "DMS, arXiv 2506.05345",
        options=DMSOptions,
        ragged=True,
        decides=True,
        decides_later=True,
        refuses=_UNSHARED,
        startup="vllm_kvpolicy.policies.admissions.dms.startup:DMSStartup",
        architectures={
            name: f"vllm_kvpolicy.policies.admissions.dms.checkpoint:{name}"
            for name in ("LlamaForCausalLMDMS", "Qwen3ForCausalLMDMS")
        },
    ),
    "kvzap": WordRow(
        "vllm_kvpolicy.policies.admissions.kvzap.policy:from_options",
        "a surrogate scores tokens by their hidden states; low scores leave with the "
        "recent window",
        "KVzap, arXiv 2601.07891",
        options=KVzapOptions,
        ragged=True,
        decides=True,
        refuses=_UNSHARED,
        startup="vllm_kvpolicy.policies.admissions.kvzap.startup:KVzapStartup",
    ),
    "duo": WordRow(
        "vllm_kvpolicy.policies.admissions.duo.policy:from_options",
        "retrieval heads keep everything, other heads only sinks and the recent "
        "window; a baseline",
        "DuoAttention, arXiv 2410.10819",
        options=DuoOptions,
        ragged=True,
        refuses=_UNSHARED,
        startup="vllm_kvpolicy.policies.admissions.duo.startup:DuoStartup",
    ),
    "local": WordRow(
        "vllm_kvpolicy.policies.admissions.local:LocalAttention",
        "only sinks and the recent window are kept; a baseline",
        "WG-KV, arXiv 2512.17452",
        ragged=True,
        refuses=dict.fromkeys(ALLOCATORS, _NO_CHOICE),
    ),
}
