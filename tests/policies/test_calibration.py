"""Calibration files: what comes back, what is refused and how, parts for ranks."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file

from support.calibration_files import make_calibration
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies.calibration import (
    Calibration,
    load,
)
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.policies.options import BaseOptions, FilePath

KINDS = ("triattention", "qfilter")
SHAPE = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
NAN = float("nan")


def calibration(kind: str) -> Calibration:
    return make_calibration(kind, num_layers=3, num_kv_heads=2, group=2, head_dim=8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    saved, path = calibration(kind), tmp_path / "file"
    saved.save(path)
    assert path.stat().st_mode & 0o444 == 0o444  # a server may run as somebody else
    got = load(path, kind)
    assert replace(got, tensors={}, path="") == replace(saved, tensors={})
    assert got.tensors.keys() == saved.tensors.keys()
    assert all(
        torch.equal(got.tensors[name], saved.tensors[name]) for name in saved.shapes
    )


def refused(path: Path, kind: str) -> str:
    with pytest.raises(ValueError) as error:
        load(path, kind)
    text = str(error.value)
    assert str(path) in text and "got" in text and "expected" in text
    return text


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "file"
    calibration("qfilter").save(path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "expected a safetensors file" in refused(path, "qfilter")


def test_no_file(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "file", "qfilter")
    assert "expected a safetensors file" in refused(tmp_path, "qfilter")


def test_nothing_in_a_file_runs(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "sprung",))

    for write in (pickle.dump, torch.save):
        with open(tmp_path / "file", "wb") as file:
            write({"filters": Trap()}, file)
        assert "expected a safetensors file" in refused(tmp_path / "file", "qfilter")
    assert not (tmp_path / "sprung").exists()


def test_another_kind(tmp_path: Path) -> None:
    calibration("qfilter").save(tmp_path / "file")
    text = refused(tmp_path / "file", "triattention")
    assert "kind: got 'qfilter', expected 'triattention'" in text


def test_any_other_safetensors_file(tmp_path: Path) -> None:
    save_file({"filters": torch.zeros(3, 2, 8)}, tmp_path / "file")
    assert "format: got None, expected" in refused(tmp_path / "file", "qfilter")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 4}, "shape of filters: got [3, 2, 8], expected [4, 2, 8]"),
        ({"head_dim": 16}, "shape of filters: got [3, 2, 8], expected [3, 2, 16]"),
        ({"num_layers": "three"}, "num_layers: got 'three', expected 'int'"),
        ({"rope_theta": None}, "rope_theta: got 'None', expected 'float'"),
        ({"tensors": {}}, "tensors: got [], expected ['filters']"),
        (
            {"tensors": {"filters": torch.zeros(3, 2, 8).half()}},
            "dtype of filters: got torch.float16, expected torch.float32",
        ),
        (
            {"tensors": {"filters": torch.full((3, 2, 8), NAN)}},
            "filters is finite: got False, expected True",
        ),
    ],
)
def test_contents_that_do_not_fit(tmp_path: Path, change: dict, text: str) -> None:
    replace(calibration("qfilter"), **change).save(tmp_path / "file")
    assert text in refused(tmp_path / "file", "qfilter")


@pytest.mark.parametrize("name", ["query_real", "query_imag", "query_abs"])
def test_every_tensor_is_checked(tmp_path: Path, name: str) -> None:
    made = calibration("triattention")
    wrong = {**made.tensors, name: made.tensors[name][:2].contiguous()}
    replace(made, tensors=wrong).save(tmp_path / "file")
    text = f"shape of {name}: got [2, 4, 4], expected [3, 4, 4]"
    assert text in refused(tmp_path / "file", "triattention")


@pytest.mark.parametrize("field", Calibration.header())
def test_a_header_without_a_field(tmp_path: Path, field: str) -> None:
    path, whole = tmp_path / "file", calibration("qfilter")
    whole.save(path)
    header = {n: str(getattr(whole, n)) for n in Calibration.header() if n != field}
    save_file(load_file(path), path, {"format": Calibration.FORMAT, **header})
    kind = Calibration.header()[field].__name__
    assert f"{field}: got None, expected '{kind}'" in refused(path, "qfilter")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("allocator", ["", "ams-"])
def test_a_policy_without_its_file(kind: str, allocator: str) -> None:
    info = registry.parse(allocator + kind)
    key = f"{kind}_calibration"
    for options in ({}, {key: None}, {key: ""}):
        with pytest.raises(ValueError) as error:
            registry.resolve(info, options)
        assert str(error.value).startswith(f"{key}: got ")
        assert "python -m training" in str(error.value)


def test_other_files_may_be_left_out() -> None:
    class Words(BaseOptions):
        words: FilePath | None = Field(None, description="words to look for")

    assert Words(words=None) == Words()
    with pytest.raises(ValueError, match="words: got 3, expected a file: words to"):
        Words(words=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPE)
def test_a_model_of_another_shape(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / "file"
    calibration(kind).save(path)
    scorer = factory.build(kind, {f"{kind}_calibration": str(path)}).scorer
    scorer.check_model(ModelShape(**SHAPE))
    with pytest.raises(ValueError) as error:
        scorer.check_model(ModelShape(**{**SHAPE, name: 32}))
    assert f"{path}: {name}: got {SHAPE[name]}, expected 32" in str(error.value)


def test_scorers_without_calibration_serve_every_model() -> None:
    assert factory.build("rkv").scorer.check_model(ModelShape(1, 2, 3, 4)) is None
