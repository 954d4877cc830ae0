"""Files and folders of DMS adapters: what comes back, what is refused and how."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.made_adapters import make_adapter
from vllm_kvpolicy.policies.admissions.dms.model import DmsAdapter, load

NAN = float("nan")
WEIGHT = DmsAdapter.full_name(1, "dms_proj_alpha.weight")
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
        found = got.tensors[DmsAdapter.full_name(layer, "dms_proj_alpha.weight")]
        assert torch.equal(found, weight[:1].bfloat16().float().expand(2, 8))


def test_names_are_those_of_checkpoints() -> None:
    adapter = make_adapter()
    assert torch.equal(adapter.stacked()["projection"][1], adapter.tensors[WEIGHT])
    assert sorted(make_adapter(layers=1).shapes) == [
        "model.layers.0.self_attn.dms_proj_alpha.weight",
        "model.layers.0.self_attn.dms_proj_alpha_norm.weight",
    ]


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    """Nothing in them runs."""

    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "sprung",))

    folder = tmp_path / "folder"
    folder.mkdir()
    assert "config.json" in refused(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "no such tensor" in refused(folder)
    shard = write_folder(folder) / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    for kept in (0, 4, 100, -1, -100):
        shard.write_bytes(content[:kept])
        assert "expected a file of `python -m training dms`" in refused(folder)
    torch.save({"a": Trap()}, shard)
    assert "expected a file of `python -m training dms`" in refused(folder)
    assert not (tmp_path / "sprung").exists()


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
        ({"model_type": "left out"}, "type of model_type: got 'NoneType'"),
        ({"hidden_size": 8.0}, "type of hidden_size: got 'float', expected 'int'"),
        ({"num_hidden_layers": True}, "type of num_hidden_layers: got 'bool'"),
        ({"dms_cr": "four"}, "type of dms_cr: got 'str', expected 'float'"),
    ],
)
def test_folders_that_do_not_fit(tmp_path: Path, change: dict, text: str) -> None:
    assert text in refused(write_folder(tmp_path, change))


def test_folders_of_something_else(tmp_path: Path) -> None:
    bias = {DmsAdapter.full_name(0, "dms_proj_alpha.bias"): torch.ones(2)}
    assert "biases, which no released model has" in refused(
        write_folder(tmp_path, None, bias)
    )
    integers = {WEIGHT: torch.ones(2, 8).int()}
    text = refused(write_folder(tmp_path, None, integers))
    assert f"{WEIGHT} is floating point: got False" in text
    for content in ("[1]", "{", ""):
        (tmp_path / "config.json").write_text(content)
        assert "config.json: got " in refused(tmp_path)
