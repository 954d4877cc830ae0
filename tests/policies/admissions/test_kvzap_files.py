"""Surrogates of KVzap: how they are read, and which ones are refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.made_surrogates import surrogate_tensors, write_surrogate
from vllm_kvpolicy.api.engine_config import check_files
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.admissions.kvzap import SurrogateScores, load
from vllm_kvpolicy.policies.compose import build

SIZES = 3, 2, 8  # layers, KV heads, hidden size
TINY = 2, 2, 64  # of the tiny model


@pytest.mark.parametrize("units", [None, 5])
def test_both_kinds_are_read(tmp_path: Path, units: int | None) -> None:
    surrogate = load(write_surrogate(tmp_path, *SIZES, units))
    assert (surrogate.num_layers, surrogate.num_kv_heads) == SIZES[:2]
    assert (surrogate.hidden_size, surrogate.num_units) == (SIZES[2], units)
    wanted = surrogate_tensors(*SIZES, units)
    for layer in range(SIZES[0]):
        found = [tensor for pair in surrogate.linears(layer) for tensor in pair]
        own = [t for name, t in wanted.items() if name.startswith(f"layers.{layer}.")]
        assert all(map(torch.equal, found, own)) and len(found) == len(own)


def test_released_dtype_becomes_float32(tmp_path: Path) -> None:
    path = write_surrogate(tmp_path, *SIZES, 5) / "model.safetensors"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(halves, path)
    for name, tensor in load(tmp_path).tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, halves[name].float())


def test_a_name_on_the_hub_is_found_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache as the hub's client lays it out; nothing is downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    name = "nvidia/KVzap-mlp-a-model"
    with pytest.raises(ValueError, match=f"^kvzap surrogate {name}: got no folder"):
        load(name)
    repository = tmp_path / "models--nvidia--KVzap-mlp-a-model"
    write_surrogate(repository / "snapshots" / ("0" * 40), *SIZES, 5)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert load(name).num_units == 5


def say(folder: Path, **keys: Any) -> None:
    """Change keys of a config.json, or leave them out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **keys}
    config = {key: value for key, value in config.items() if value != "left out"}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "llama"}, "model_type: got 'llama', expected 'kvzap'"),
        ({"n_modules": 0}, "n_modules: got 0, expected 'an integer of at least 1'"),
        ({"output_dim": "left out"}, "output_dim: got None"),
        ({"hidden_dim": None}, "missing tensors: got .'layers.0.bias'"),
        ({"hidden_dim": 6}, r"shape of layers.0.0.weight: got \[5, 8\], expected \[6"),
        ({"n_modules": 4}, "missing tensors: got .'layers.3.0.bias'"),
        ({"n_modules": 2}, "unexpected tensors: got .'layers.2.0.bias'"),
        ({"n_modules": 10**9}, "n_modules: got 1000000000, expected 'at most 12'"),
    ],
    ids=str,
)
def test_wrong_sizes_are_named(tmp_path: Path, keys: dict, reason: str) -> None:
    say(write_surrogate(tmp_path, *SIZES, 5), **keys)
    with pytest.raises(ValueError, match=f"^kvzap surrogate .*{reason}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", None, "config.json: got .*No such file"),
        ("config.json", b"{", "config.json: got .*expected a folder with config.json"),
        ("config.json", b"[]", "content: got 'list', expected 'an object'"),
        ("model.safetensors", None, "model.safetensors: got No such file.*a folder"),
        ("model.safetensors", pickle.dumps({}), "model.safetensors: got .*a folder"),
    ],
)
def test_broken_folders_are_named(
    tmp_path: Path, file: str, content: bytes | None, reason: str
) -> None:
    folder = write_surrogate(tmp_path / "made", *SIZES, 5)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"^kvzap surrogate {folder}.*{reason}"):
        load(folder)


def test_start_checks(policy_config: Any, tmp_path: Path) -> None:
    """Before a model is loaded; any window will do."""

    def check(folder: Path, **values: Any) -> None:
        options = {"kvzap_model": str(folder)}
        asked = {"policy": "kvzap", "policy_config": options, **values}
        check_files(KVPolicyConfig.from_dict(asked), policy_config)

    check(write_surrogate(tmp_path / "fits", *TINY, 16), recent=128)
    check(tmp_path / "fits", policy="kvzap+ams-tova", recent=32)
    for place, key in enumerate(("n_modules", "output_dim", "input_dim")):
        sizes = [size + (number == place) for number, size in enumerate(TINY)]
        folder = write_surrogate(tmp_path / key, *sizes, None)
        wrong = f"^kvzap_model: kvzap surrogate {folder}: {key}: got {sizes[place]}, "
        with pytest.raises(ValueError, match=wrong + f"expected {TINY[place]}$"):
            check(folder)
    with pytest.raises(ValueError, match="^kvzap_model: .*hf download NAME"):
        check(tmp_path / "missing")
    with pytest.raises(ValueError, match="^kvzap_model: got None, expected a file: "):
        check_files(KVPolicyConfig.from_dict({"policy": "kvzap"}), policy_config)


def test_the_default_threshold_is_that_of_the_released_examples(tmp_path: Path) -> None:
    options = {"kvzap_model": str(write_surrogate(tmp_path, *TINY, None))}
    made = build("kvzap", options).decider
    assert isinstance(made, SurrogateScores) and made.lowest == -4
    assert build("kvzap", {**options, "kvzap_threshold": -6}).decider.lowest == -6
    with pytest.raises(ValueError, match="^kvzap_threshold: got nan, expected a numb"):
        build("kvzap", {**options, "kvzap_threshold": float("nan")})
