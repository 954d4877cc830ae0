"""Gate files, released and ours: what comes back, what is refused and how."""

import math
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.made_gates import make_gates
from vllm_kvpolicy.policies.admissions.wgkv import Gates, load

MODEL = {
    "flavour": "qwen3",
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope_theta": 5e5,
}
NAN = float("nan")
Tensors = dict[str, Tensor]


def write_released(path: Path, tensors: Tensors) -> Path:
    path = path.with_suffix(".pt")
    torch.save({name: torch.nn.Parameter(t) for name, t in tensors.items()}, path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        load(path)
    text = str(error.value)
    assert str(path) in text and "got" in text and "expected" in text
    return text


def test_a_released_file(tmp_path: Path) -> None:
    tensors = make_gates().tensors
    got = load(write_released(tmp_path / "file", tensors))
    assert (got.num_layers, got.num_kv_heads, got.head_dim) == (3, 2, 8)
    assert (got.window, got.threshold, got.sinks) == (256, 0.1, 0)
    assert got.model == got.flavour == ""
    assert math.isnan(got.rope_theta) and math.isnan(got.kept_fraction)
    assert got.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(got.tensors[name], tensor)
        assert not got.tensors[name].requires_grad


def test_a_released_file_in_bfloat16(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in make_gates().tensors.items()}
    got = load(write_released(tmp_path / "file", tensors))
    assert all(torch.equal(got.tensors[k], t.float()) for k, t in tensors.items())


@pytest.mark.parametrize(
    ("flavour", "units", "parameters"),
    [("llama", 512, 1_057_032), ("qwen3", 192, 396_552)],
)
def test_a_file_of_the_sizes_that_are_released(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flavour: str,
    units: int,
    parameters: int,
) -> None:
    """As the authors' script saves one: float32 parameters that lie on a GPU."""
    gates = make_gates(layers=2, heads=8, channels=128, units=units)
    assert sum(t.numel() for t in gates.tensors.values()) == 2 * parameters
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    path = write_released(tmp_path / f"{flavour}-0.16", dict(gates.tensors))
    got = load(path)
    sizes = {"num_layers": 2, "num_kv_heads": 8, "head_dim": 128}
    got.check_model(flavour=flavour, rope_theta=5e5, **sizes)
    assert all(torch.equal(got.tensors[k], t) for k, t in gates.tensors.items())
    assert {tensor.device.type for tensor in got.tensors.values()} == {"cpu"}


def test_weights_are_stacked_by_layer_head_and_unit() -> None:
    gates = make_gates()
    stacked = gates.stacked()
    assert stacked["first"].shape == (3, 2, 5, 16)
    row = gates.tensors[Gates.full_name(2, "conv1.weight")][5 + 3, :, 0]
    assert torch.equal(stacked["first"][2, 1, 3], row)  # unit 3 of head 1


def test_pickles_that_are_not_zipped_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    tensors = dict(make_gates().tensors)
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert "got a different kind of file" in refused(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([torch.ones(2)], "content: got 'list'"),
        ({}, "content: got 'dict'"),
        ({1: torch.ones(2)}, "name 1 is text"),
        ({"a": 1}, "a is a tensor"),
        ({"a": torch.eye(2).to_sparse()}, "layout of a"),
        ({"a": torch.ones(2).int()}, "a is floating point"),
        (
            {"a": torch.ones(2)},
            "tensors: got ['a'], expected 'model.layers.0.self_attn.g",
        ),
        (OrderedDict(), "content: got 'OrderedDict'"),
    ],
)
def test_pickles_of_something_else(tmp_path: Path, content: object, text: str) -> None:
    path = tmp_path / "file.pt"
    torch.save(content, path)
    assert text in refused(path)


def test_a_released_file_is_checked_by_its_shape(tmp_path: Path) -> None:
    path = write_released(tmp_path / "file", dict(make_gates(units=12).tensors))
    gates = load(path)
    gates.check_model(**{**MODEL, "rope_theta": 1.0})
    with pytest.raises(ValueError, match="hidden units for llama: got 12, expected 32"):
        gates.check_model(**{**MODEL, "flavour": "llama"})
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        with pytest.raises(ValueError, match=f"{name}: got {MODEL[name]}, expected 7"):
            gates.check_model(**{**MODEL, name: 7})
