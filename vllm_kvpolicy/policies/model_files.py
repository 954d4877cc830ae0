"""Files made for one model: tensors in safetensors, fields as text in the header."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

Types = Mapping[str, type]
"""Fields of the header, and what turns their text into a value."""


def save(
    path: str | Path, format_name: str, fields: Mapping[str, Any], tensors: Mapping
) -> None:
    """Write a file; overwrites one that exists.

    Args:
        path: of the file.
        format_name: first field of the header.
        fields: the others; written as text.
        tensors: by name.
    """
    header = {name: str(value) for name, value in fields.items()}
    content = to_bytes(dict(tensors), {"format": format_name, **header})
    Path(path).write_bytes(content)  # not save_file: its files are for their owner only


def load(
    kind: str, path: str | Path, format_name: str, types: Types, valid: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the fields and the tensors of a file; it cannot run code.

    Args:
        kind: what errors call the file.
        path: the file.
        format_name: what its header must begin with.
        types: its fields.
        valid: the kinds of files that are valid, for errors.

    Raises:
        ValueError: naming the file, the field, and what was found and expected there.
    """
    header, tensors = read(kind, path, valid)
    expect(kind, path, "format", header.get("format"), format_name)
    values = {}
    for name, to_value in types.items():
        text = header.get(name)
        try:
            values[name] = None if text is None else to_value(text)
        except ValueError:
            values[name] = None
        if values[name] is None:
            expect(kind, path, name, text, to_value.__name__)
    return values, tensors


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
    """Check that tensors have their shapes, are float32, and finite.

    Raises:
        ValueError: naming the file, the tensor, and what was found and expected.
    """
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
