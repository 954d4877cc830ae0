"""Files made for one model: tensors in safetensors, fields as text in the header."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor


class ModelFile:
    """What a file of ours holds; a subclass is a frozen dataclass.

    Its fields of text and numbers are in the header of the file, as text.

    Attributes:
        NAME: what errors call the file.
        FORMAT: first field of the header.
        tensors: float32 by name, see `shapes`.
        path: where it was read from, for errors.
    """

    NAME: ClassVar[str]
    FORMAT: ClassVar[str]
    tensors: Mapping[str, Tensor]
    path: str | Path

    @classmethod
    def header(cls) -> dict[str, Any]:
        """Return the fields of the header, and what turns their text into a value."""
        kinds = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        return {name: kind for name, kind in kinds.items() if kind in (str, int, float)}

    @classmethod
    def from_file(cls, path: str | Path, valid: str) -> Self:
        """Read a file that `save` wrote; does not check its tensors.

        Takes and raises what `read` does; errors name the field, too.
        """
        header, tensors = read(cls.NAME, path, valid)
        expect(cls.NAME, path, "format", header.get("format"), cls.FORMAT)
        values = {}
        for name, to_value in cls.header().items():
            text = header.get(name)
            try:
                values[name] = None if text is None else to_value(text)
            except ValueError:
                values[name] = None
            if values[name] is None:
                expect(cls.NAME, path, name, text, to_value.__name__)
        return cls(**values, tensors=tensors, path=path)  # type: ignore[call-arg]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file; overwrites one that exists."""
        header = {name: str(getattr(self, name)) for name in self.header()}
        content = to_bytes(dict(self.tensors), {"format": self.FORMAT, **header})
        # Not save_file: its files are for their owner only.
        Path(path).write_bytes(content)

    def fits(self, **expected: Any) -> None:
        """Raise ValueError unless fields have the values of a model, naming both."""
        for name, value in expected.items():
            expect(self.NAME, self.path, name, getattr(self, name), value)

    def require(self, name: str, is_valid: bool, valid: str) -> None:
        """Raise ValueError, as `fits`, unless the value of a field is valid."""
        if not is_valid:
            self.fits(**{name: valid})

    def check_sizes(self, *names: str) -> None:
        """Check that these fields are at least 1; raises as `fits`."""
        for name in names:
            self.require(name, getattr(self, name) >= 1, "at least 1")


class LayerFile(ModelFile):
    """A file with tensors of the same names for each layer.

    Attributes:
        PREFIX: what their names begin with, behind `self_attn` of a layer.
        NAMES: the rest of a name -> field of `stacked`.
        num_layers: L.
    """

    PREFIX: ClassVar[str] = ""
    NAMES: ClassVar[Mapping[str, str]]
    num_layers: int

    @classmethod
    def full_name(cls, layer: int, name: str) -> str:
        """Return the name of a tensor of `NAMES` in a file."""
        return f"model.layers.{layer}.self_attn.{cls.PREFIX}{name}"

    def layer_shapes(self) -> Iterable[tuple[int, ...]]:
        """Return the shapes of one layer's tensors, in the order of `NAMES`."""
        raise NotImplementedError

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors."""
        of_layer = dict(zip(self.NAMES, self.layer_shapes(), strict=True))
        return {
            self.full_name(layer, name): shape
            for layer in range(self.num_layers)
            for name, shape in of_layer.items()
        }

    def check(self) -> None:
        """Check that it has the tensors of `shapes`, see `check_tensors`."""
        most = len(self.tensors)
        self.require("num_layers", self.num_layers <= most, f"at most {most}")
        check_tensors(self.NAME, self.path, self.tensors, self.shapes)

    def stacked(self) -> dict[str, Tensor]:
        """Return float32 tensors by field, with a leading L."""
        layers = range(self.num_layers)
        return {
            field: torch.stack([self.tensors[self.full_name(i, name)] for i in layers])
            for name, field in self.NAMES.items()
        }

    @classmethod
    def unstacked(cls, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a file; the inverse of `stacked`."""
        return {
            cls.full_name(layer, name): tensor.detach()
            .to("cpu", torch.float32)
            .contiguous()
            for name, field in cls.NAMES.items()
            for layer, tensor in enumerate(weights[field])
        }


def read(
    kind: str,
    path: str | Path,
    valid: str,
    is_wanted: Callable[[str], object] | None = None,
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the header and the tensors of a safetensors file; it cannot run code.

    Args:
        kind: what errors call the file.
        valid: the kinds of files that are valid, for errors.
        is_wanted: takes the name of a tensor; None reads all of them.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = filter(is_wanted, file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
            return file.metadata() or {}, tensors
    except (OSError, SafetensorError) as error:
        got = "a folder" if Path(path).is_dir() else error
        raise ValueError(f"{kind} {path}: got {got}, expected {valid}") from None


def read_json(kind: str, path: Path, valid: str) -> Any:
    """Return what a file of JSON holds; takes and raises what `read` does."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{kind} {path}: got {error}, expected {valid}") from None


def as_float32(
    kind: str, path: str | Path, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors in float32; raises ValueError if one is not floating point."""
    for name, tensor in tensors.items():
        floating = tensor.is_floating_point()
        expect(kind, path, f"{name} is floating point", floating, True)
    return {name: tensor.detach().float() for name, tensor in tensors.items()}


def check_tensors(
    kind: str,
    path: str | Path,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise ValueError unless these are all, of these shapes, float32 and finite."""
    expect(kind, path, "missing tensors", sorted(shapes.keys() - tensors.keys()), [])
    expect(kind, path, "unexpected tensors", sorted(tensors.keys() - shapes.keys()), [])
    for name, shape in shapes.items():
        found = tensors[name]
        expect(kind, path, f"shape of {name}", list(found.shape), list(shape))
        expect(kind, path, f"dtype of {name}", found.dtype, torch.float32)
        expect(kind, path, f"{name} is finite", bool(found.isfinite().all()), True)


def expect(kind: str, path: str | Path, key: str, found: Any, expected: Any) -> None:
    """Raise ValueError unless the value of `key` in a file is the one expected."""
    if found != expected:
        raise ValueError(f"{kind} {path}: {key}: got {found!r}, expected {expected!r}")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a whole model, which files have to fit.

    L attention layers, Hq query heads and H KV heads per layer, D channels per head.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, vllm_config: Any) -> "ModelShape":
        """Read the sizes from a finished VllmConfig."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        return cls(
            num_layers=model.get_num_layers(parallel),
            num_heads=model.model_arch_config.total_num_attention_heads,
            num_kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
        )


@contextmanager
def errors_name(key: str) -> Iterator[None]:
    """Begin every ValueError raised inside with the option that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
