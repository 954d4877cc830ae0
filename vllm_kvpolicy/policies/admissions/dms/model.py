"""How a model that was trained with DMS decides: its rule, and adapters' files.

Three kinds of models decide themselves. Released ones (nvidia/Qwen3-8B-DMS-8x) have
`dms_*` keys in their config.json and borrow a channel of the first query head of each
group. Those of Model-Optimizer's recipe have more keys and adapters of their own next
to the model's weights. Third parties put `dms_metadata.json` next to a plain model
whose channel is also borrowed.

Source: Dynamic Memory Sparsification, arXiv 2506.05345, section 3 and appendix B, and
https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7/experimental/dms. Deviations of
models from the paper are fields of `DmsRule`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor

from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.model_files import LayerFile

# Model types, and vLLM's classes of such models.
FLAVOURS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class DmsAdapter(LayerFile):
    """The adapter of a model, and what it was trained for.

    A small projection per layer, with names and shapes as the checkpoints of
    https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7b/experimental/dms have them.

    It reads the residual stream h before each layer's input norm and decides for each
    token and KV head whether to drop a token: where alpha_scale * projection(RMSNorm(h,
    norm)) - alpha_offset is above 0. The norm's epsilon is the model's `rms_norm_eps`.

    Args:
        model: name of the model, as it was given; "" where a file does not say.
        flavour: type of the model, one of `FLAVOURS`.
        num_layers, num_kv_heads: L and H.
        hidden_size: d, channels of the residual stream.
        window: W; query i sees key j where i - j <= W, W + 1 keys with itself.
        alpha_scale: factor on the projection's output.
        alpha_offset: subtracted from that.
        shift: the token at t decides on the one at t - shift.
        target_cr: tokens per token kept that it was trained for.
        kept_fraction: kept share of the tokens that were evaluated after training, of
            all layers and heads; NaN where a file does not say.
    """

    NAME = "dms adapter"
    FORMAT = "vllm-kvpolicy dms adapter 1"
    # The fields are those of `kernels.dms_decision.DecisionWeights`.
    NAMES = {
        "dms_proj_alpha_norm.weight": "norm",
        "dms_proj_alpha.weight": "projection",
    }

    model: str
    flavour: str
    num_layers: int
    num_kv_heads: int
    hidden_size: int
    window: int
    target_cr: float
    kept_fraction: float
    tensors: Mapping[str, Tensor]
    alpha_scale: float = 100.0
    alpha_offset: float = 5.0
    shift: int = 1
    path: str | Path = ""

    def layer_shapes(self) -> Iterable[tuple[int, ...]]:
        """Return the shapes of a layer's norm [d] and projection [H, d]."""
        return (self.hidden_size,), (self.num_kv_heads, self.hidden_size)


expect = partial(model_files.expect, DmsAdapter.NAME)
VALID = (
    "a file of `python -m training dms`, or a checkpoint folder with dms_proj_alpha "
    "tensors"
)
_TENSOR = re.compile(r"model\.layers\.\d{1,6}\.self_attn\.(dms_proj_alpha.*)")


def load(path: str | Path) -> DmsAdapter:
    """Read an adapter: a file of ours, or a checkpoint folder that has one.

    Ours are safetensors with the other fields of `DmsAdapter` as text in the header. A
    checkpoint is a folder with the whole model, of which the adapter's tensors alone
    are read, as float32. Neither can run code.

    Raises:
        ValueError: naming the file, the key, and what was found and expected there.
    """
    if Path(path).is_dir():
        adapter, per_layer = _load_folder(Path(path))
    else:
        adapter, per_layer = DmsAdapter.from_file(path, VALID), False
    _check_fields(adapter)
    adapter.check()
    if per_layer:
        _follow_first_head(adapter)
    return adapter


def _check_fields(adapter: DmsAdapter) -> None:
    require, scale = adapter.require, adapter.alpha_scale
    require("flavour", adapter.flavour in FLAVOURS, " or ".join(FLAVOURS))
    adapter.check_sizes("num_layers", "num_kv_heads", "hidden_size", "window")
    require("shift", adapter.shift in (0, 1), "0 or 1")
    require("target_cr", 1 <= adapter.target_cr < math.inf, "a number of at least 1")
    require("alpha_scale", 0 < scale < math.inf, "a number above 0")
    require("alpha_offset", math.isfinite(adapter.alpha_offset), "a number")


def _load_folder(folder: Path) -> tuple[DmsAdapter, bool]:
    """Read a checkpoint; also return whether its first head decides for a layer."""
    config = model_files.read_json(DmsAdapter.NAME, folder / "config.json", VALID)
    if not isinstance(config, dict):
        _refuse(folder / "config.json", type(config).__name__)
    if not any(key.startswith("dms_") for key in config):
        _refuse(folder, "a config.json without dms_ keys")
    # Keys that are not there mean what they do to the class that wrote the others.
    if not config.get("dms_separate_alpha", False):
        _refuse(
            folder, "a model whose decision is a query channel, which needs no adapter"
        )
    expect(folder, "dms_disable_eviction", config.get("dms_disable_eviction", 0), 0)
    per = config.get("dms_alpha_per", "head")
    if per not in ("head", "layer"):
        expect(folder, "dms_alpha_per", per, "head or layer")
    keys = {
        "flavour": ("model_type", str, None),
        "num_layers": ("num_hidden_layers", int, None),
        "num_kv_heads": ("num_key_value_heads", int, None),
        "hidden_size": ("hidden_size", int, None),
        "window": ("dms_window_size", int, 512),
        "target_cr": ("dms_cr", float, 8),
        "alpha_scale": ("dms_alpha_scale", float, 100.0),
        "alpha_offset": ("dms_initial_alpha_offset", float, 5.0),
    }
    values: dict[str, Any] = {}
    for field, (key, kind, default) in keys.items():
        found = config.get(key, default)
        if kind is float and type(found) is int:
            found = float(found)
        expect(folder, f"type of {key}", type(found).__name__, kind.__name__)
        values[field] = found
    name = config.get("_name_or_path")
    return DmsAdapter(
        **values,
        model=name if isinstance(name, str) else "",
        kept_fraction=math.nan,
        tensors=_read_tensors(folder),
        path=folder,
    ), per == "layer"


def _refuse(path: Path, found: str) -> NoReturn:
    raise ValueError(f"{DmsAdapter.NAME} {path}: got {found}, expected {VALID}")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the adapter's tensors of all safetensors files, in float32."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= model_files.read(DmsAdapter.NAME, path, VALID, _TENSOR.fullmatch)[1]
    if not tensors:
        _refuse(folder, "no such tensor in a .safetensors file")
    biases = [name for name in tensors if name.endswith("dms_proj_alpha.bias")]
    if biases:
        expect(folder, "biases, which no released model has", biases, [])
    return model_files.as_float32(DmsAdapter.NAME, folder, tensors)


def _follow_first_head(adapter: DmsAdapter) -> None:
    """Give all heads of a layer the weights of its first one."""
    for layer in range(adapter.num_layers):
        weight = adapter.tensors[adapter.full_name(layer, "dms_proj_alpha.weight")]
        weight.copy_(weight[:1].expand_as(weight).clone())


METADATA_FILE = "dms_metadata.json"
# Of the released models, where their files leave a value out.
WINDOW, SCALE, OFFSET = 512, 100.0, 5.0


@dataclass(frozen=True)
class DmsRule:
    """How decisions are read from a model, and what follows from them.

    A token is dropped once it is more than `window` tokens old if its logit is above 0.

    Args:
        is_borrowed: logits are a channel of the model's queries, which attention must
            not see; otherwise adapters compute them.
        window: tokens before itself that a query always sees.
        scale: factor on a borrowed channel or an adapter's output.
        offset: taken from that.
        channel: which channel is borrowed; counts from the end if negative.
        shift: the token at t decides on the one at t - shift, 0 or 1.
        zero_after_rope: the borrowed channel is also set to 0 after the rotation.
        per_layer: the first KV head decides for all of its layer.
    """

    is_borrowed: bool = True
    window: int = WINDOW
    scale: float = SCALE
    offset: float = OFFSET
    channel: int = -1
    shift: int = 1
    zero_after_rope: bool = True
    per_layer: bool = False


def rule_of_config(config: Any) -> DmsRule | None:
    """Return the rule of a model's text configuration, None without `dms_*` keys.

    Keys, its attributes, that are missing mean what they do to the released models.
    """
    keys = {key: value for key, value in vars(config).items() if value is not None}
    if not any(key.startswith("dms_") for key in keys):
        return None
    offset = float(keys.get("dms_initial_alpha_offset", OFFSET))
    if keys.get("dms_disable_eviction", False):
        offset = math.inf
    return DmsRule(
        is_borrowed=not keys.get("dms_separate_alpha", False),
        window=int(keys.get("dms_window_size", WINDOW)),
        scale=float(keys.get("dms_alpha_scale", SCALE)),
        offset=offset,
        per_layer=keys.get("dms_alpha_per", "head") == "layer",
    )


def model_folder(model_config: Any) -> Path:
    """Return the folder of a model: itself, or what was downloaded from the hub."""
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    name, revision = model_config.model, model_config.revision
    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def _metadata_file(model: str, revision: str | None) -> Path | None:
    """Return the path of a model's `dms_metadata.json`; uses the local cache only."""
    path = Path(model) / METADATA_FILE
    if path.is_file():
        return path
    if Path(model).is_dir() or model.count("/") > 1:
        return None
    try:
        found = try_to_load_from_cache(model, METADATA_FILE, revision=revision)
    except HFValidationError:  # vLLM knows more kinds of names than the hub
        return None
    return Path(found) if isinstance(found, str) else None


def rule_of_metadata(model: str, revision: str | None = None) -> DmsRule | None:
    """Return the rule of a model's `dms_metadata.json`, None if there is none.

    Args:
        model: a folder, or a name on the hub, of which the file has been downloaded.
        revision: of a name on the hub.

    Raises:
        ValueError: the file cannot be read.
    """
    path = _metadata_file(model, revision)
    if path is None:
        return None
    try:
        values = json.loads(path.read_text())
        return DmsRule(
            window=int(values.get("window_size", WINDOW)),
            scale=float(values.get("alpha_scale", SCALE)),
            offset=float(values.get("alpha_offset", OFFSET)),
            shift=0,
            zero_after_rope=False,
        )
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"{path}: got {error}, expected JSON with window_size, alpha_scale and "
            "alpha_offset"
        ) from None


def rule_of_model(model_config: Any) -> DmsRule | None:
    """Return the rule that a model names, or None; ValueError where it is broken."""
    found = rule_of_config(model_config.hf_text_config)
    return found or rule_of_metadata(model_config.model, model_config.revision)


def rule_for(model_config: Any, adapter: DmsAdapter | None, options: Any) -> DmsRule:
    """Return how decisions are read from a model, and what follows from them.

    Args:
        model_config: vLLM's ModelConfig.
        adapter: decides in place of the model.
        options: of the word, which have the last word.

    Raises:
        ValueError: the model has no decisions, and there is no adapter; or it borrows
            a channel, and there is one.
    """
    rule = rule_of_model(model_config)
    if adapter is not None:
        if rule is not None and rule.is_borrowed:
            raise ValueError(
                f"dms_adapter: {model_config.model} already decides in a channel of "
                "its queries; leave the adapter out"
            )
        rule = DmsRule(
            is_borrowed=False,
            window=adapter.window,
            scale=adapter.alpha_scale,
            offset=adapter.alpha_offset,
            shift=adapter.shift,
        )
    if rule is None:
        raise ValueError(
            f"dms: {model_config.model} has no dms_* keys in config.json and no "
            f"{METADATA_FILE} on this machine, so it makes no decisions of its own; "
            "set dms_adapter to an adapter from `python -m training dms`"
        )
    names = ("window", "channel", "shift", "zero_after_rope")
    given = {name: getattr(options, f"dms_{name}") for name in names}
    return replace(rule, **{k: v for k, v in given.items() if v is not None})


def refuse_plain(model_config: Any) -> None:
    """Raise ValueError for a model that borrows a channel and is served without DMS."""
    rule = rule_of_model(model_config)
    if rule is None or not rule.is_borrowed:
        return
    kind = model_config.hf_text_config.model_type
    advice = (
        f"add --kv-policy dms --kv-recent {rule.window}"
        if kind in FLAVOURS
        else f"--kv-policy dms supports {', '.join(FLAVOURS)}, not {kind}"
    )
    raise ValueError(
        f"{model_config.model} was trained with DMS: one channel of its queries "
        "marks the tokens to drop and is not part of attention. Without DMS the "
        f"model would silently give wrong answers; {advice}"
    )


def missing_architecture(config: Mapping[str, Any]) -> str | None:
    """Return the architecture of a model with `dms_*` keys, which leaves it out.

    Returns None where config.json has no such keys; raises ValueError where it has, but
    the model's type is not supported.
    """
    rule = rule_of_config(SimpleNamespace(**config))
    if rule is None:
        return None
    kind = supported(config.get("model_type"))
    return FLAVOURS[kind] if rule.is_borrowed else f"{FLAVOURS[kind]}DMS"


def supported(kind: Any) -> str:
    """Return the type of a model; raise ValueError where it is not supported."""
    if kind not in FLAVOURS:
        raise ValueError(
            f"dms: got a model of type {kind}, expected one of {', '.join(FLAVOURS)}"
        )
    return str(kind)
