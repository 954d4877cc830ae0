"""Files and folders of DMS adapters: what comes back, what is refused and how."""

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.made_adapters import make_adapter
from vllm_kvpolicy.policies.admissions.dms.model import (
    NAMES,
    DmsAdapter,
    full_name,
    load,
    unstacked,
)

MODEL = {"flavour": "qwen3", "num_layers": 3, "num_kv_heads": 2, "hidden_size": 8}
NAN = float("nan")
WEIGHT = full_name(1, "dms_proj_alpha.weight")
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "_name_or_path": "a model",
    "dms_separate_alpha": True,
    "dms_alpha_per": "head",
    "dms_alpha_scale": 50.0,
    "dms_initial_alpha_offset": 2.5,
    "dms_window_size": 64,
    "dms_cr": 4,
    "dms_disable_eviction": False,
}
NORM = "model.layers.0.input_layernorm.weight"


def write_folder(
    folder: Path, change: dict | None = None, extra: dict | None = None
) -> Path:
    """A checkpoint in two shards, in bfloat16, with other tensors beside."""
    folder.mkdir(exist_ok=True)
    config = {**CONFIG, **(change or {})}
    config = {name: value for name, value in config.items() if value != "left out"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: t.bfloat16() for name, t in make_adapter().tensors.items()}
    tensors |= {NORM: torch.ones(8), **(extra or {})}
    names = sorted(tensors)
    for index, part in enumerate((names[:4], names[4:])):
        shard = {name: tensors[name] for name in part}
        save_file(shard, folder / f"model-{index + 1:05}-of-00002.safetensors")
    return folder


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        load(path)
    text = str(error.value)
    assert str(path) in text and "got" in text and "expected" in text
    return text


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    saved, path = make_adapter(shift=0), tmp_path / "file"
    saved.save(path)
    assert path.stat().st_mode & 0o444 == 0o444  # a server may run as somebody else
    got = load(path)
    assert replace(got, tensors={}, path="") == replace(saved, tensors={})
    assert got.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(got.tensors[k], t) for k, t in saved.tensors.items())


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    saved = make_adapter()
    got = load(write_folder(tmp_path))
    assert math.isnan(got.kept_fraction) and got.path == tmp_path
    plain = {"tensors": {}, "path": "", "kept_fraction": 0.0}
    assert replace(got, **plain) == replace(saved, **plain)
    assert got.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(got.tensors[name], tensor.bfloat16().float())


def test_a_folder_that_leaves_out_what_its_class_knows(tmp_path: Path) -> None:
    left_out = ("scale", "offset", "window")
    change = {key: "left out" for key in CONFIG if key.endswith(left_out)}
    change |= {"dms_window_size": "left out", "dms_cr": "left out"}
    got = load(write_folder(tmp_path, change))
    assert (got.window, got.target_cr, got.shift) == (512, 8.0, 1)
    assert (got.alpha_scale, got.alpha_offset) == (100.0, 5.0)


def test_a_folder_whose_first_heads_decide(tmp_path: Path) -> None:
    got = load(write_folder(tmp_path, {"dms_alpha_per": "layer"}))
    for layer, weight in enumerate(make_adapter().stacked()["projection"]):
        found = got.tensors[full_name(layer, "dms_proj_alpha.weight")]
        assert torch.equal(found, weight[:1].bfloat16().float().expand(2, 8))


def test_stacking_has_an_inverse() -> None:
    adapter = make_adapter()
    stacked = adapter.stacked()
    assert stacked["norm"].shape == (3, 8)
    assert torch.equal(stacked["projection"][1], adapter.tensors[WEIGHT])
    again = unstacked(stacked)
    assert again.keys() == adapter.tensors.keys() == adapter.shapes.keys()
    assert all(torch.equal(again[name], t) for name, t in adapter.tensors.items())


def test_names_are_those_of_checkpoints() -> None:
    assert sorted(make_adapter(layers=1).shapes) == [
        "model.layers.0.self_attn.dms_proj_alpha.weight",
        "model.layers.0.self_attn.dms_proj_alpha_norm.weight",
    ]


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -100])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "file"
    make_adapter().save(path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "expected a file of `python -m training dms`" in refused(path)
    shard = write_folder(tmp_path / "folder") / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:kept])
    assert "expected a file of `python -m training dms`" in refused(tmp_path / "folder")


def test_no_file(tmp_path: Path) -> None:
    refused(tmp_path / "file")
    assert "config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "no such tensor" in refused(tmp_path)


def test_nothing_in_a_file_runs(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"a": Trap()}, tmp_path / "zipped")
    (tmp_path / "plain").write_bytes(pickle.dumps(Trap()))
    folder = write_folder(tmp_path / "folder")
    (folder / "model-00001-of-00002.safetensors").unlink()
    torch.save({"a": Trap()}, folder / "model-00001-of-00002.safetensors")
    for name in ("zipped", "plain", "folder"):
        assert "expected a file of `python -m training dms`" in refused(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_to_be_there_and_fit(
    tmp_path: Path, layer: int, name: str
) -> None:
    path, key = tmp_path / "file", full_name(layer, name)
    tensors = dict(make_adapter().tensors)
    whole = tensors.pop(key)
    make_adapter(tensors=tensors).save(path)
    assert f"missing tensors: got ['{key}']" in refused(path)
    for wrong in (whole[:-1].clone(), whole[..., None].clone(), whole[:0].clone()):
        make_adapter(tensors={**tensors, key: wrong}).save(path)
        found, expected = list(wrong.shape), list(whole.shape)
        assert f"shape of {key}: got {found}, expected {expected}" in refused(path)
    make_adapter(tensors={**tensors, key: whole.half()}).save(path)
    assert f"dtype of {key}: got torch.float16" in refused(path)
    for value in (NAN, float("inf")):
        bad = whole.clone()
        bad.view(-1)[-1] = value
        make_adapter(tensors={**tensors, key: bad}).save(path)
        assert f"{key} is finite: got False, expected True" in refused(path)


def test_tensors_that_do_not_belong_there(tmp_path: Path) -> None:
    path, tensors = tmp_path / "file", {NORM: torch.ones(8)}
    make_adapter(tensors={**make_adapter().tensors, **tensors}).save(path)
    text = f"unexpected tensors: got ['{NORM}'], expected []"
    assert text in refused(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 4}, "missing tensors: got ['model.layers.3."),
        ({"num_layers": 2}, "unexpected tensors: got ['model.layers.2."),
        ({"num_layers": 10**12}, "num_layers: got 1000000000000, expected 'at most 6"),
        ({"num_layers": 0}, "num_layers: got 0, expected 'at least 1'"),
        ({"num_kv_heads": 4}, "got [2, 8], expected [4, 8]"),
        ({"num_kv_heads": 0}, "num_kv_heads: got 0, expected 'at least 1'"),
        ({"hidden_size": 16}, "got [8], expected [16]"),
        ({"hidden_size": "eight"}, "hidden_size: got 'eight', expected 'int'"),
        ({"window": 0}, "window: got 0, expected 'at least 1'"),
        ({"window": 2.5}, "window: got '2.5', expected 'int'"),
        ({"shift": 2}, "shift: got 2, expected '0 or 1'"),
        ({"target_cr": 0.5}, "target_cr: got 0.5, expected 'a number of at least 1'"),
        ({"target_cr": NAN}, "target_cr: got nan"),
        ({"alpha_scale": 0.0}, "alpha_scale: got 0.0, expected 'a number above 0'"),
        ({"alpha_offset": NAN}, "alpha_offset: got nan, expected 'a number'"),
        ({"flavour": "gemma"}, "flavour: got 'gemma', expected 'llama or qwen3'"),
        ({"kept_fraction": None}, "kept_fraction: got 'None', expected 'float'"),
    ],
)
def test_headers_that_do_not_fit(tmp_path: Path, change: dict, text: str) -> None:
    path = tmp_path / "file"
    make_adapter(**change).save(path)
    assert text in refused(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"dms_separate_alpha": False},
            "got a model whose decision is a query channel",
        ),
        ({"dms_separate_alpha": "left out"}, "decision is a query channel"),
        ({k: "left out" for k in CONFIG if "dms" in k}, "without dms_ keys"),
        ({"dms_disable_eviction": True}, "dms_disable_eviction: got True"),
        ({"dms_alpha_per": "token"}, "dms_alpha_per: got 'token', expected 'head or"),
        ({"model_type": "gemma"}, "flavour: got 'gemma'"),
        ({"model_type": "left out"}, "type of model_type: got 'NoneType'"),
        ({"hidden_size": 8.0}, "type of hidden_size: got 'float', expected 'int'"),
        ({"num_hidden_layers": True}, "type of num_hidden_layers: got 'bool'"),
        ({"dms_window_size": 0}, "window: got 0, expected 'at least 1'"),
        ({"dms_cr": "four"}, "type of dms_cr: got 'str', expected 'float'"),
        ({"dms_alpha_scale": -1}, "alpha_scale: got -1.0, expected 'a number above"),
        ({"num_key_value_heads": 4}, "got [2, 8], expected [4, 8]"),
        ({"num_hidden_layers": 2}, "unexpected tensors: got ['model.layers.2."),
    ],
)
def test_folders_that_do_not_fit(tmp_path: Path, change: dict, text: str) -> None:
    assert text in refused(write_folder(tmp_path, change))


def test_folders_of_something_else(tmp_path: Path) -> None:
    bias = {full_name(0, "dms_proj_alpha.bias"): torch.ones(2)}
    assert "biases, which no released model has" in refused(
        write_folder(tmp_path, None, bias)
    )
    integers = {WEIGHT: torch.ones(2, 8).int()}
    text = refused(write_folder(tmp_path, None, integers))
    assert f"{WEIGHT} is floating point: got False" in text
    for content in ("[1]", "{", ""):
        (tmp_path / "config.json").write_text(content)
        assert "config.json: got " in refused(tmp_path)


def test_any_other_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file(dict(make_adapter().tensors), path)
    assert f"format: got None, expected '{DmsAdapter.FORMAT}'" in refused(path)
    save_file(load_file(path), path, {"format": DmsAdapter.FORMAT})
    assert "model: got None, expected 'str'" in refused(path)


@pytest.mark.parametrize(
    ("name", "other"),
    [("flavour", "llama"), ("num_layers", 4), ("num_kv_heads", 8), ("hidden_size", 16)],
)
def test_an_adapter_of_another_model(tmp_path: Path, name: str, other: object) -> None:
    path = tmp_path / "file"
    make_adapter().save(path)
    adapter = load(path)
    adapter.fits(**MODEL)
    with pytest.raises(ValueError) as error:
        adapter.fits(**{**MODEL, name: other})
    assert str(error.value) == (
        f"dms adapter {path}: {name}: got {MODEL[name]!r}, expected {other!r}"
    )
