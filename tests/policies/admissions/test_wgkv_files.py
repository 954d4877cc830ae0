"""Gate files, released and ours: what comes back, what is refused and how."""

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.made_gates import make_gates
from vllm_kvpolicy.policies.admissions.wgkv import (
    NAMES,
    full_name,
    load,
    unstacked,
)

MODEL = {
    "flavour": "qwen3",
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope_theta": 5e5,
}
NAN = float("nan")
FIRST = full_name(0, "conv1.weight")
Tensors = dict[str, torch.Tensor]


def write_ours(path: Path, tensors: Tensors) -> Path:
    path = path.with_suffix(".safetensors")
    make_gates(tensors=tensors).save(path)
    return path


def write_released(path: Path, tensors: Tensors) -> Path:
    path = path.with_suffix(".pt")
    torch.save({name: torch.nn.Parameter(t) for name, t in tensors.items()}, path)
    return path


WRITERS = pytest.mark.parametrize("write", [write_ours, write_released])
Writer = Callable[[Path, Tensors], Path]


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        load(path)
    text = str(error.value)
    assert str(path) in text and "got" in text and "expected" in text
    return text


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    saved, path = make_gates(), tmp_path / "file"
    saved.save(path)
    assert path.stat().st_mode & 0o444 == 0o444  # a server may run as somebody else
    got = load(path)
    assert replace(got, tensors={}, path="") == replace(saved, tensors={})
    assert got.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(got.tensors[k], t) for k, t in saved.tensors.items())


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


def test_stacking_has_an_inverse() -> None:
    gates = make_gates()
    stacked = gates.stacked()
    assert stacked["first"].shape == (3, 2, 5, 16)
    row = gates.tensors[full_name(2, "conv1.weight")][5 + 3, :, 0]
    assert torch.equal(stacked["first"][2, 1, 3], row)  # unit 3 of head 1
    again = unstacked(stacked)
    assert again.keys() == gates.tensors.keys() == gates.shapes.keys()
    assert all(torch.equal(again[name], t) for name, t in gates.tensors.items())


@WRITERS
@pytest.mark.parametrize("kept", [0, 4, 100, -1, -100])
def test_a_truncated_file(tmp_path: Path, write: Writer, kept: int) -> None:
    path = write(tmp_path / "file", dict(make_gates().tensors))
    path.write_bytes(path.read_bytes()[:kept])
    assert "expected a" in refused(path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ""])
def test_no_file(tmp_path: Path, suffix: str) -> None:
    refused((tmp_path / "file").with_suffix(suffix))
    folder = (tmp_path / "folder").with_suffix(suffix)
    folder.mkdir()
    refused(folder)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_file_runs(tmp_path: Path, suffix: str, zipped: bool) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "sprung",))

    path = (tmp_path / "file").with_suffix(suffix)
    content = {**make_gates().tensors, "more": Trap()}
    if zipped:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    assert "expected a" in refused(path)
    assert not (tmp_path / "sprung").exists()


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
        ({"a": torch.ones(2)}, f"tensors: got ['a'], expected '{full_name(0, '')}"),
        (OrderedDict(), "content: got 'OrderedDict'"),
    ],
)
def test_pickles_of_something_else(tmp_path: Path, content: object, text: str) -> None:
    path = tmp_path / "file.pt"
    torch.save(content, path)
    assert text in refused(path)


@WRITERS
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_to_be_there(
    tmp_path: Path, write: Writer, layer: int, name: str
) -> None:
    tensors = dict(make_gates().tensors)
    key = full_name(layer, name)
    del tensors[key]
    text = refused(write(tmp_path / "file", tensors))
    assert key in text
    assert "missing" in text or "among them" in text


@WRITERS
def test_tensors_that_do_not_belong_there(tmp_path: Path, write: Writer) -> None:
    key = full_name(1, "value_norm.weight")
    tensors = {**make_gates().tensors, key: torch.ones(8)}
    text = refused(write(tmp_path / "file", tensors))
    assert f"unexpected tensors: got ['{key}'], expected []" in text


@WRITERS
def test_a_layer_that_is_left_out(tmp_path: Path, write: Writer) -> None:
    tensors = {
        name: tensor
        for name, tensor in make_gates().tensors.items()
        if ".layers.1." not in name
    }
    text = refused(write(tmp_path / "file", tensors))
    assert f"missing tensors: got ['{full_name(1, 'conv1.bias')}', " in text


@WRITERS
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_is_checked(tmp_path: Path, write: Writer, name: str) -> None:
    tensors = dict(make_gates().tensors)
    key = full_name(2, name)
    whole = tensors[key]
    for wrong in (whole[:-1].clone(), whole[..., None].clone(), whole[:0].clone()):
        tensors[key] = wrong
        found, expected = list(wrong.shape), list(whole.shape)
        text = refused(write(tmp_path / "file", tensors))
        assert f"shape of {key}: got {found}, expected {expected}" in text


@WRITERS
@pytest.mark.parametrize("name", NAMES)
def test_the_first_layer_is_checked_too(
    tmp_path: Path, write: Writer, name: str
) -> None:
    """Other shapes are read off it, so another tensor may be the one told."""
    tensors = dict(make_gates().tensors)
    key = full_name(0, name)
    whole = tensors[key]
    for wrong in (whole[:-1].clone(), whole[..., None].clone(), whole[:0].clone()):
        tensors[key] = wrong
        assert "shape of model.layers." in refused(write(tmp_path / "file", tensors))


@WRITERS
def test_a_wrong_shape_is_told(tmp_path: Path, write: Writer) -> None:
    tensors = dict(make_gates().tensors)
    key = full_name(1, "conv1.weight")
    tensors[key] = torch.zeros(10, 15, 1)
    text = refused(write(tmp_path / "file", tensors))
    assert f"shape of {key}: got [10, 15, 1], expected [10, 16, 1]" in text


@WRITERS
@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_finite(
    tmp_path: Path, write: Writer, value: float, name: str
) -> None:
    tensors = {k: t.clone() for k, t in make_gates().tensors.items()}
    key = full_name(2, name)
    tensors[key].view(-1)[-1] = value
    text = refused(write(tmp_path / "file", tensors))
    assert f"{key} is finite: got False, expected True" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 4}, "missing tensors: got ['model.layers.3."),
        ({"num_layers": 2}, "unexpected tensors: got ['model.layers.2."),
        ({"num_layers": 10**12}, "num_layers: got 1000000000000, expected 'at most 18"),
        ({"num_layers": 0}, "num_layers: got 0, expected 'at least 1'"),
        ({"num_kv_heads": 4}, "got [10, 16, 1], expected [8, 16, 1]"),
        ({"num_kv_heads": 0}, "num_kv_heads: got 0, expected 'at least 1'"),
        ({"head_dim": 16}, "got [8], expected [16]"),
        ({"head_dim": "eight"}, "head_dim: got 'eight', expected 'int'"),
        ({"rope_theta": NAN}, "rope_theta: got nan, expected 'a number above 0'"),
        ({"window": 0}, "window: got 0, expected 'at least 1'"),
        ({"window": 2.5}, "window: got '2.5', expected 'int'"),
        ({"sinks": -1}, "sinks: got -1, expected 'at least 0'"),
        ({"threshold": 1.0}, "threshold: got 1.0, expected 'a number from 0 to"),
        ({"threshold": NAN}, "threshold: got nan"),
        ({"flavour": "gemma"}, "flavour: got 'gemma', expected 'llama or qwen3'"),
        ({"kept_fraction": None}, "kept_fraction: got 'None', expected 'float'"),
    ],
)
def test_headers_that_do_not_fit(tmp_path: Path, change: dict, text: str) -> None:
    path = tmp_path / "file"
    make_gates(**change).save(path)
    assert text in refused(path)


def test_half_precision_is_not_ours(tmp_path: Path) -> None:
    tensors = {**make_gates().tensors}
    tensors[FIRST] = tensors[FIRST].half()
    path = write_ours(tmp_path / "file", tensors)
    text = f"dtype of {FIRST}: got torch.float16, expected torch.float32"
    assert text in refused(path)


def test_a_header_without_a_field(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_gates().save(path)
    save_file(load_file(path), path, {"format": "vllm-kvpolicy wgkv gates 1"})
    assert "model: got None, expected 'str'" in refused(path)


def test_any_other_safetensors_file(tmp_path: Path) -> None:
    save_file(dict(make_gates().tensors), tmp_path / "file")
    assert "format: got None, expected 'vllm-kvpolicy" in refused(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("flavour", "llama"),
        ("num_layers", 4),
        ("num_kv_heads", 8),
        ("head_dim", 16),
        ("rope_theta", 1e4),
    ],
)
def test_gates_of_another_model(tmp_path: Path, name: str, other: object) -> None:
    path = write_ours(tmp_path / "file", dict(make_gates().tensors))
    gates = load(path)
    gates.check_model(**MODEL)
    with pytest.raises(ValueError) as error:
        gates.check_model(**{**MODEL, name: other})
    assert str(error.value) == (
        f"wgkv gates {path}: {name}: got {MODEL[name]!r}, expected {other!r}"
    )


def test_a_released_file_is_checked_by_its_shape(tmp_path: Path) -> None:
    path = write_released(tmp_path / "file", dict(make_gates(units=12).tensors))
    gates = load(path)
    gates.check_model(**{**MODEL, "rope_theta": 1.0})
    with pytest.raises(ValueError, match="hidden units for llama: got 12, expected 32"):
        gates.check_model(**{**MODEL, "flavour": "llama"})
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        with pytest.raises(ValueError, match=f"{name}: got {MODEL[name]}, expected 7"):
            gates.check_model(**{**MODEL, name: 7})
