"""KVzap: a surrogate scores each token by what the layer's attention is given.

A token whose score is below a threshold leaves with the recent window.

Source: KVzap (arXiv 2601.07891), with the rule of `presses/kvzap_press.py` and
`presses/dms_press.py` in kvpress 0.5.5; see docs/kvzap.md. Deviations: tokens leave the
window at events, also inside a prompt; heads are filled up to whole pages with refused
tokens; sinks are kept. Theirs hides tokens of a prompt when it has been read whole.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from pydantic import Field
from torch import Tensor, nn

from vllm_kvpolicy.config_values import own_config
from vllm_kvpolicy.kernels.chunks import few_sizes
from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.base import LoadedModel, Needs
from vllm_kvpolicy.policies.hooks import HeadLogits, attention_modules
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.policies.options import ExactOptions, FilePath
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.policies.words import SIZED_BY_HELD, BaseAdmission

NAME = "kvzap surrogate"
expect = partial(model_files.expect, NAME)


@dataclass(frozen=True)
class Surrogate:
    """The surrogate of a model: a small network per layer. Files do not name the model.

    Names and sizes are those of `KVzapConfig` and `KVzapModel` in
    `presses/kvzap_press.py` of kvpress 0.5.5; tensors become float32. Neither of the
    folder's files, config.json and model.safetensors, can run code.

    Args:
        num_layers: L, `n_modules` of config.json.
        hidden_size: d, what the attention of a layer is given per token; `input_dim`.
        num_kv_heads: H, KV heads per layer; `output_dim`.
        num_units: M, hidden units per layer, `hidden_dim`; None for a linear surrogate.
        tensors: float32 by name, see `shapes`.
    """

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    num_units: int | None
    tensors: Mapping[str, Tensor]
    path: str | Path = ""

    @property
    def _names(self) -> tuple[str, ...]:
        """What the names of the linear layers end in, `layers.I` before them."""
        return ("",) if self.num_units is None else (".0", ".2")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors.

        `layers.I.weight` [H, d] and `layers.I.bias` [H]; with hidden units
        `layers.I.0.weight` [M, d], `layers.I.0.bias` [M], `layers.I.2.weight` [H, M]
        and `layers.I.2.bias` [H].
        """
        units = () if self.num_units is None else (self.num_units,)
        sizes = (self.hidden_size, *units, self.num_kv_heads)
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            for name, (before, after) in zip(self._names, pairwise(sizes), strict=True):
                shapes[f"layers.{layer}{name}.weight"] = (after, before)
                shapes[f"layers.{layer}{name}.bias"] = (after,)
        return shapes

    def linears(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return weight and bias of a layer's linear layers, first to last."""
        names, tensors = [f"layers.{layer}{name}" for name in self._names], self.tensors
        return [(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in names]

    def of_heads(self, shard: HeadShard) -> "Surrogate":
        """Return the surrogate that scores for a rank's KV heads alone."""
        last = tuple(f"{self._names[-1]}.{part}" for part in ("weight", "bias"))
        tensors = {
            name: shard.kv_heads(tensor, 0) if name.endswith(last) else tensor
            for name, tensor in self.tensors.items()
        }
        heads = len(tensors[f"layers.0{last[1]}"])
        return replace(self, num_kv_heads=heads, tensors=tensors)

    def check_model(self, model: ModelShape, hidden_size: int | None = None) -> None:
        """Check that the surrogate was trained for a model of this shape.

        Args:
            model: its sizes.
            hidden_size: channels of its hidden states; None to leave them out.

        Raises:
            ValueError: naming the folder, the key of config.json, and both values.
        """
        expect(self.path, "n_modules", self.num_layers, model.num_layers)
        expect(self.path, "output_dim", self.num_kv_heads, model.num_kv_heads)
        if hidden_size is not None:
            expect(self.path, "input_dim", self.hidden_size, hidden_size)


def surrogate_scores(
    hidden: Tensor, linears: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Score tokens for every KV head of a layer.

    Args:
        hidden: [..., T, d] floating point, what the layer's attention is given, behind
            the input norm.
        linears: weight [out, in] and bias [out] of each linear layer, in the dtype of
            `hidden`, with an exact GELU between two of them; the last has H outputs.

    Returns:
        [..., T, H] float32, estimated logarithms of the KVzip+ scores.
    """
    rows = few_sizes(hidden)
    for number, (weight, bias) in enumerate(linears):
        rows = F.linear(F.gelu(rows) if number else rows, weight, bias)
    return rows[..., : hidden.shape[-2], :].float()


CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
VALID = (
    f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a name on the hub that `hf "
    "download NAME` has brought to this machine"
)
MODEL_TYPE = "kvzap"
SIZES = ("n_modules", "input_dim", "output_dim")  # and hidden_dim, which may be null


def load(name: str | Path) -> Surrogate:
    """Read a surrogate from a folder, or from what has been downloaded from the hub.

    Args:
        name: a folder, or a name on the hub such as nvidia/KVzap-mlp-Qwen3-8B.

    Raises:
        ValueError: naming the folder, the key, and what was found and expected there.
    """
    folder = _folder(name)
    path = folder / CONFIG_FILE
    config = model_files.read_json(NAME, path, VALID)
    if not isinstance(config, dict):
        expect(path, "content", type(config).__name__, "an object")
    expect(folder, "model_type", config.get("model_type"), MODEL_TYPE)
    units = config.get("hidden_dim")
    sizes = {key: config.get(key) for key in SIZES}
    for key, size in {**sizes, "hidden_dim": 1 if units is None else units}.items():
        if type(size) is not int or size < 1:
            expect(folder, key, size, "an integer of at least 1")
    _, found = model_files.read(NAME, folder / WEIGHTS_FILE, VALID)
    surrogate = Surrogate(
        num_layers=config["n_modules"],
        hidden_size=config["input_dim"],
        num_kv_heads=config["output_dim"],
        num_units=units,
        tensors=model_files.as_float32(NAME, folder, found),
        path=folder,
    )
    if surrogate.num_layers > len(found):
        expect(folder, "n_modules", surrogate.num_layers, f"at most {len(found)}")
    model_files.check_tensors(NAME, folder, surrogate.tensors, surrogate.shapes)
    return surrogate


def _folder(name: str | Path) -> Path:
    """Return the folder that a name means; uses the local cache of the hub only."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise ValueError(f"{NAME} {name}: got no folder, expected {VALID}") from None


ARGUMENT = "hidden_states"  # of the forward method of vLLM's attention modules


class SurrogateScores(BaseAdmission):
    """Admits the tokens whose score is not below a threshold.

    Args:
        surrogate: as read from a folder; once layers have its tensors, its sizes alone.
        lowest: score that a token needs to stay.
        exact: tokens are hidden as soon as they leave the window.
    """

    summary = (
        "a surrogate scores tokens by their hidden states; low scores leave with the "
        "recent window"
    )
    source = "KVzap, arXiv 2601.07891"
    decides = True
    fitted = True
    refuses = SIZED_BY_HELD

    class Options(ExactOptions):
        kvzap_model: FilePath = Field(
            description="the model's surrogate as NVIDIA releases them, "
            "KVzap-mlp-MODEL or KVzap-linear-MODEL: a folder with config.json and "
            "model.safetensors, or a name on the hub that has been downloaded"
        )
        kvzap_threshold: float = Field(
            -4.0,
            ge=-1_000_000,
            le=1_000_000,
            description="tokens with a score below this are dropped; scores are "
            "natural logarithms",
        )

    @classmethod
    def build(cls, options: Any) -> Self:
        surrogate = load(options.kvzap_model)
        return cls(surrogate, options.kvzap_threshold, options.exact)

    @classmethod
    def check_start(cls, options: Any, kept: Any, vllm_config: Any) -> None:
        with model_files.errors_name("kvzap_model"):
            load(options.kvzap_model).check_model(
                ModelShape.of(vllm_config), vllm_config.model_config.get_hidden_size()
            )

    def __init__(self, surrogate: Surrogate, lowest: float, exact: bool) -> None:
        self.needs = Needs(until=True, exact=exact)
        self.surrogate, self.lowest = surrogate, lowest
        self._scorers: list[HeadLogits] = []

    def check_model(self, model: ModelShape) -> None:
        self.surrogate.check_model(model)

    def take_heads(self, shard: HeadShard) -> None:
        self.surrogate = self.surrogate.of_heads(shard)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for each in self._scorers for part in each.buffers())

    def attach(self, model: LoadedModel) -> None:
        # Besides itself, a query sees as many tokens as are recent at an event.
        self.window = own_config(model.vllm_config).recent_tokens + 1
        shape = model.step_tokens, self.surrogate.num_kv_heads
        place = model.device, model.dtype
        attentions = attention_modules(model.module, model.layers)
        for index, attention in enumerate(attentions):
            linears = [
                (weight.to(*place), bias.to(*place))
                for weight, bias in self.surrogate.linears(index)
            ]
            scores = torch.zeros(shape, device=model.device)
            self._scorers.append(attach_surrogate(attention, scores, linears))
        self.surrogate = replace(self.surrogate, tensors={})

    def decisions(self, layer: int, key: Tensor, positions: Tensor) -> Decisions:
        """Return [T, H] decisions of the tokens themselves; see `BaseAdmission`."""
        is_below = self._scorers[layer].logits[: len(positions)] < self.lowest
        return Decisions(~is_below)


def attach_surrogate(
    attention: nn.Module, scores: Tensor, linears: Sequence[tuple[Tensor, Tensor]]
) -> HeadLogits:
    """Score what an attention module is given; returns what holds the scores.

    Args:
        attention: vLLM's attention module of a decoder layer, called with hidden
            states [T, d] behind the input norm.
        scores: [step_tokens, H] float32, written.
        linears: see `surrogate_scores`.

    Raises:
        ValueError: its forward method takes no hidden states.
    """
    arguments = list(inspect.signature(attention.forward).parameters)
    if ARGUMENT not in arguments:
        raise ValueError(
            f"{type(attention).__name__}: expected a forward method that takes "
            f"{ARGUMENT}, as in vLLM's Llama and Qwen3, got {', '.join(arguments)}"
        )
    tensors: dict[str, Tensor] = {}
    for number, (weight, bias) in enumerate(linears):
        tensors |= {f"weight_{number}": weight, f"bias_{number}": bias}
    taken = HeadLogits(logits=scores, **tensors)
    taken.depth, taken.place = len(linears), arguments.index(ARGUMENT)
    attention.add_module("kv_policy_logits", taken)
    attention.register_forward_pre_hook(_score, with_kwargs=True)
    return taken


def _score(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Store the scores of [T, d]; a pre-hook."""
    taken = attention.kv_policy_logits
    hidden = kwargs[ARGUMENT] if ARGUMENT in kwargs else args[taken.place]
    linears = [
        (getattr(taken, f"weight_{number}"), getattr(taken, f"bias_{number}"))
        for number in range(taken.depth)
    ]
    taken(surrogate_scores(hidden, linears))
