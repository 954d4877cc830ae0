"""Files made for one model: tensors in safetensors, fields as text in the header."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes


class ModelFile:
    """What a file of ours holds; a subclass is a frozen dataclass.

    Its fields of text and numbers are in the header of the file, as text.

    Attributes:
        NAME: what errors call the file.
        FORMAT: first field of the header.
        tensors: float32 by name.
        path: where it was read from, for errors.
    """

    NAME: ClassVar[str]
    FORMAT: ClassVar[str]
    tensors: Mapping[str, torch.Tensor]
    path: str | Path

    @classmethod
    def header(cls) -> dict[str, Any]:
        """Return the fields of the header, and what turns their text into a value."""
        kinds = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        return {name: kind for name, kind in kinds.items() if kind in (str, int, float)}

    @classmethod
    def from_file(cls, path: str | Path, valid: str) -> Self:
        """Read a file that `save` wrote; does not check its tensors.

        Args:
            path: the file; nothing in it can run.
            valid: the kinds of files that are valid, for errors.

        Raises:
            ValueError: naming the file, the field, and what was found and expected.
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
        """Check that fields have the values of a model.

        Raises:
            ValueError: naming the file, the field, and both values.
        """
        for name, value in expected.items():
            expect(self.NAME, self.path, name, getattr(self, name), value)

    def check_sizes(self, *names: str) -> None:
        """Check that these fields are at least 1.

        Raises:
            ValueError: naming the file, the field, and what was found and expected.
        """
        for name in names:
            if getattr(self, name) < 1:
                self.fits(**{name: "at least 1"})


def read(
    kind: str, path: str | Path, valid: str
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the header and the tensors of a safetensors file; it cannot run code.

    Args:
        kind: what errors call the file.
        path: the file.
        valid: the kinds of files that are valid, for errors.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{kind} {path}: got {error}, expected {valid}") from None


def check_tensors(
    kind: str,
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Check that all tensors are there, no others, of their shapes, float32, finite.

    Raises:
        ValueError: naming the file, the tensor, and what was found and expected.
    """
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

    Args:
        num_layers: L, attention layers.
        num_heads: Hq, query heads per layer.
        num_kv_heads: H, KV heads per layer.
        head_dim: D, channels per head.
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
