"""WG-KV: g = sigmoid(MLP(norm(key before RoPE), norm(key))), per layer and KV head.

Source: WG-KV (arXiv 2512.17452) section 3.2; see kernels.wgkv_gate and docs/wgkv.md.
Deviations: gates are evaluated from cached keys and their positions, at events; where
attention has to be exact, while tokens are computed.
"""

import math
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, paged_gates
from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.base import EventInputs, LoadedModel, Needs
from vllm_kvpolicy.policies.model_files import LayerFile, ModelShape
from vllm_kvpolicy.policies.options import ExactOptions, FilePath
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.policies.words import SIZED_BY_HELD, BaseAdmission

FLAVOURS = ("llama", "qwen3")  # model types; the gate of qwen3 reads normalised keys
WINDOW, THRESHOLD = 256, 0.1  # of all released gates
# Hidden units of released gates, in head sizes.
RELEASED_UNITS = {"llama": 4, "qwen3": 1.5}


def sizes_of(model: ModelShape) -> dict[str, int]:
    """Return the sizes of a model that its gates share, by the fields of `Gates`."""
    sizes = vars(model).copy()
    del sizes["num_heads"]
    return sizes


@dataclass(frozen=True)
class Gates(LayerFile):
    """The gates of a model, and what they were trained for.

    A small network per layer and KV head, with names and shapes as the weights at
    https://huggingface.co/WG-KV/checkpoints have them.

    Args:
        model: name of the model, as it was given; like `flavour` "" where a file does
            not say, as released ones do not.
        flavour: one of `FLAVOURS`.
        num_layers, num_kv_heads, head_dim: L, H and D, as of `ModelShape`.
        rope_theta: base of the rotary embedding; like the other floating point numbers
            but `threshold` NaN where a file does not say.
        window: tokens that are always seen, the querying one included.
        threshold: tokens with a gate above this are kept (the paper's tau).
        sinks: first tokens that are kept in any case.
        sparsity_weight: the paper's lambda.
        kept_fraction: kept share of the tokens that were looked at after training, of
            all layers and heads.
    """

    NAME = "wgkv gates"
    FORMAT = "vllm-kvpolicy wgkv gates 1"
    PREFIX = "g_predictors."
    # The fields are those of `kernels.wgkv_gate.GateWeights`.
    NAMES = {
        "pre_key_norm.weight": "pre_norm",
        "post_key_norm.weight": "post_norm",
        "conv1.weight": "first",
        "conv1.bias": "first_bias",
        "conv2.weight": "second",
        "conv2.bias": "second_bias",
    }

    model: str
    flavour: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    window: int
    threshold: float
    sinks: int
    sparsity_weight: float
    kept_fraction: float
    tensors: Mapping[str, Tensor]
    path: str | Path = ""

    def layer_shapes(self) -> Iterable[tuple[int, ...]]:
        """Return the shapes of `NAMES`: as the first bias says, M units per head."""
        heads, channels = self.num_kv_heads, self.head_dim
        first_bias = self.tensors.get(self.full_name(0, "conv1.bias"), torch.empty(0))
        units = max(1, first_bias.numel() // heads)
        return (
            (channels,),
            (channels,),
            (heads * units, 2 * channels, 1),
            (heads * units,),
            (heads, units, 1),
            (heads,),
        )

    def check_model(self, flavour: str, rope_theta: float, **sizes: int) -> None:
        """Check that the gates were trained for a model of this kind; raises as `fits`.

        Args:
            flavour: type of the model.
            rope_theta: base of its rotary embedding.
            **sizes: see `sizes_of`.
        """
        self.fits(**sizes)
        if self.flavour:
            self.fits(flavour=flavour)
        elif flavour in RELEASED_UNITS:
            units = self.shapes[self.full_name(0, "conv2.weight")][1]
            wanted = int(RELEASED_UNITS[flavour] * self.head_dim)
            expect(self.path, f"hidden units for {flavour}", units, wanted)
        if not math.isnan(self.rope_theta):
            self.fits(rope_theta=rope_theta)

    def stacked(self) -> dict[str, Tensor]:
        """Return the fields of `kernels.wgkv_gate.GateWeights`, with a leading L."""
        heads, channels = self.num_kv_heads, self.head_dim
        shapes = {
            "first": (self.num_layers, heads, -1, 2 * channels),
            "first_bias": (self.num_layers, heads, -1),
            "second": (self.num_layers, heads, -1),
        }
        return {
            field: tensor.view(shapes.get(field, tensor.shape))
            for field, tensor in super().stacked().items()
        }

    @classmethod
    def unstacked(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        num_layers, num_heads, num_units, channels = weights["first"].shape
        shapes = {
            "first": (num_layers, num_heads * num_units, channels, 1),
            "first_bias": (num_layers, num_heads * num_units),
            "second": (num_layers, num_heads, num_units, 1),
        }
        return super().unstacked(
            {
                field: tensor.reshape(shapes.get(field, tensor.shape))
                for field, tensor in weights.items()
            }
        )


_NAME = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.g_predictors\..+")
expect = partial(model_files.expect, Gates.NAME)


def load(path: str | Path) -> Gates:
    """Read a gate file: `.pt` as the authors released them, else one of ours.

    Both name their tensors as the authors do
    (https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/scripts/train.py), and nothing
    in either can run. Ours are safetensors with the other fields of `Gates` as text in
    the header.

    A released file says neither window nor threshold: it gets those of the paper, which
    `dataclasses.replace` changes.

    Raises:
        ValueError: naming the file, the key, and what was found and expected there.
    """
    is_released = Path(path).suffix.lower() == ".pt"
    gates = _load_released(path) if is_released else _load_ours(path)
    gates.check()
    return gates


def _load_ours(path: str | Path) -> Gates:
    valid = "a safetensors file, or a .pt file released by the authors"
    gates = Gates.from_file(path, valid)
    gates.require("flavour", gates.flavour in FLAVOURS, " or ".join(FLAVOURS))
    gates.check_sizes("num_layers", "num_kv_heads", "head_dim", "window")
    gates.require("sinks", gates.sinks >= 0, "at least 0")
    is_share = 0 <= gates.threshold < 1
    gates.require("threshold", is_share, "a number from 0 to below 1")
    gates.require("rope_theta", gates.rope_theta > 0, "a number above 0")
    return gates


def _load_released(path: str | Path) -> Gates:
    """Read a file of the authors; fields that it leaves out are the paper's."""
    tensors = _read_pickle(path)
    matches = [_NAME.fullmatch(name) for name in tensors]
    # Counted, since a name could hold any number.
    num_layers = len({int(match[1]) for match in matches if match})
    head_dim = _only_size(path, tensors, "pre_key_norm.weight")
    num_kv_heads = _only_size(path, tensors, "conv2.bias")
    return Gates(
        model="",
        flavour="",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=math.nan,
        window=WINDOW,
        threshold=THRESHOLD,
        sinks=0,
        sparsity_weight=math.nan,
        kept_fraction=math.nan,
        tensors=tensors,
        path=path,
    )


def _only_size(path: str | Path, tensors: Mapping[str, Tensor], name: str) -> int:
    """Return the size of a tensor of layer 0 that has to have one dimension."""
    name = Gates.full_name(0, name)
    if name not in tensors:
        expect(path, "tensors", sorted(tensors)[:8], f"{name} among them")
    shape = list(tensors[name].shape)
    if len(shape) != 1 or not shape[0]:
        expect(path, f"shape of {name}", shape, "one size above 0")
    return shape[0]


def _read_pickle(path: str | Path) -> dict[str, Tensor]:
    """Return the flat dict of tensors that a file holds, in float32.

    The unpickler makes tensors, numbers and plain containers only.
    """
    expected = "a dict of tensors written by torch.save"
    if not Path(path).is_file() or not zipfile.is_zipfile(path):
        kind = "a different kind of file" if Path(path).is_file() else "no file"
        raise ValueError(f"{Gates.NAME} {path}: got {kind}, expected {expected}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch has no one error for what a broken file causes
        # Its own words advise to load such a file in a way that runs what is in it.
        raise ValueError(
            f"{Gates.NAME} {path}: got content that cannot be read safely, expected "
            f"{expected}"
        ) from None
    if not isinstance(content, dict) or not content:
        expect(path, "content", type(content).__name__, expected)
    for name, value in content.items():
        expect(path, f"name {name!r} is text", isinstance(name, str), True)
        expect(path, f"{name} is a tensor", isinstance(value, Tensor), True)
        expect(path, f"layout of {name}", value.layout, torch.strided)
    return model_files.as_float32(Gates.NAME, path, content)


class WriteGates(BaseAdmission):
    """Admits the tokens whose trained gate is above a threshold.

    Args:
        gates: as read from a file.
        threshold: the paper's tau; None for the file's.
        exact: tokens decide while they are computed.
    """

    summary = "trained gates choose which tokens stay when they leave the recent window"
    source = "WG-KV, arXiv 2512.17452"
    rotates = True
    fitted = True
    refuses = SIZED_BY_HELD

    class Options(ExactOptions):
        wgkv_gates: FilePath = Field(
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

    @classmethod
    def build(cls, options: Any) -> Self:
        return cls(load(options.wgkv_gates), options.wgkv_threshold, options.exact)

    @classmethod
    def check_start(cls, options: Any, kept: Any, vllm_config: Any) -> None:
        path = options.wgkv_gates
        with model_files.errors_name("wgkv_gates"):
            gates, text = load(path), vllm_config.model_config.hf_text_config
            rope = getattr(text, "rope_parameters", None) or {}
            theta = float(rope.get("rope_theta", math.nan))
            sizes = sizes_of(ModelShape.of(vllm_config))
            gates.check_model(text.model_type, theta, **sizes)
            if kept.sink_tokens < gates.sinks:
                raise ValueError(
                    f"wgkv gates {path}: trained with {gates.sinks} sinks, got "
                    f"--kv-sinks {kept.sink_tokens}; set --kv-sinks {gates.sinks} or "
                    "more"
                )
            if kept.recent_tokens != gates.window:
                raise ValueError(
                    f"wgkv gates {path}: trained with a window of {gates.window} "
                    f"tokens, got --kv-recent {kept.recent_tokens}; set --kv-recent "
                    f"{gates.window}"
                )

    def __init__(self, gates: Gates, threshold: float | None, exact: bool) -> None:
        turns = Needs(rope=True, halves=True, alike=True)
        self.needs = turns | Needs(keys=not exact, until=exact, exact=exact)
        self.file = gates
        self.window = gates.window
        self.threshold = gates.threshold if threshold is None else threshold
        self.weights = GateWeights(**gates.stacked())

    def check_model(self, model: ModelShape) -> None:
        self.file.fits(**sizes_of(model))

    def take_heads(self, shard: HeadShard) -> None:
        self.weights = self.weights.of_heads(shard.kv_heads)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.tensors().values())

    def attach(self, model: LoadedModel) -> None:
        self._rope = model.rope
        self.weights = self.weights.to(model.device, model.dtype)
        self._of_layer = [
            GateWeights(**{k: t[i : i + 1] for k, t in self.weights.tensors().items()})
            for i in range(len(model.layers))
        ]

    def decisions(self, layer: int, key: Tensor, positions: Tensor) -> Decisions:
        """Return [T, H] decisions of the tokens themselves; see `BaseAdmission`."""
        assert self._rope is not None  # `needs` says so
        # One event of one layer, [1, 1, H, T, D].
        keys = PagedTokens.from_dense(key.transpose(0, 1)[None, None])
        shape = keys.shape[:-1]
        token = torch.arange(len(positions), device=positions.device).expand(shape)
        weights = self._of_layer[layer]
        rows = keys, token, positions.expand(shape)
        gates = paged_gates(*rows, self._rope, weights)[0, 0]
        return Decisions((gates > self.threshold).T)

    def gates(self, inputs: EventInputs, token: Tensor) -> Tensor:
        keys = inputs.paged("keys")
        # Weights move to the device, and to the dtype of the model, once.
        self.weights = self.weights.to(keys.device, keys.pools[0].dtype)
        # Nothing has been dropped since the last event: positions count to the end.
        offset = token - inputs.lengths[..., None]
        positions = inputs.end[:, None, None, None] + offset
        rope = inputs.given("rope")
        return paged_gates(keys, token, positions, rope, self.weights)
