"""Files made for one model: what comes back, what is refused and how.

What calibrations, DMS adapters and write gates have in common; each has a file for what
it has alone.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.calibration_files import make_calibration
from support.made_adapters import make_adapter
from support.made_gates import make_gates
from vllm_kvpolicy.policies import calibration
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies.admissions import wgkv
from vllm_kvpolicy.policies.admissions.dms import model as dms
from vllm_kvpolicy.policies.calibration import Calibration
from vllm_kvpolicy.policies.model_files import ModelShape


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Args:
        made: what a file is made of.
        load: of the module.
        format_name: what the header begins with.
        model: what `check_model` takes of a model that fits.
        save: writes what a file is made of.
    """

    made: Any
    load: Callable[[Path], Any]
    format_name: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    save: Callable[[Any, Path], None] = lambda made, path: made.save(path)


def save_released(gates: wgkv.Gates, path: Path) -> None:
    parameters = {name: torch.nn.Parameter(t) for name, t in gates.tensors.items()}
    torch.save(parameters, path)


def load_released(path: Path) -> wgkv.Gates:
    released = path.with_suffix(".pt")
    if path.is_file():
        path.replace(released)
    return wgkv.load(released)


SIZES = {"num_layers": 3, "num_kv_heads": 2}
HEADS = {**SIZES, "num_heads": 4, "head_dim": 8}
KINDS = {
    **{
        name: Kind(
            made=make_calibration(name, 3, 2, 2, 8),
            load=partial(calibration.load, kind=name),
            format_name=Calibration.FORMAT,
            model=HEADS,
        )
        for name in ("qfilter", "triattention")
    },
    "dms": Kind(
        made=make_adapter(shift=0),
        load=dms.load,
        format_name=dms.DmsAdapter.FORMAT,
        model={"flavour": "qwen3", **SIZES, "hidden_size": 8},
    ),
    "wgkv": Kind(
        made=make_gates(),
        load=wgkv.load,
        format_name=wgkv.Gates.FORMAT,
        model={"flavour": "qwen3", **SIZES, "head_dim": 8, "rope_theta": 5e5},
    ),
}


RELEASED = Kind(make_gates(), load_released, save=save_released)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=[*KINDS, "released"])
def any_kind(request: pytest.FixtureRequest) -> Kind:
    """Those that we write, and the one that the authors of WG-KV write."""
    return KINDS.get(request.param, RELEASED)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def refused(kind: Kind, path: Path) -> str:
    with pytest.raises(ValueError) as error:
        kind.load(path)
    text = str(error.value)
    assert str(path) in text and "got" in text and "expected" in text
    return text


def test_a_file_comes_back_as_it_was(path: Path, kind: Kind) -> None:
    kind.made.save(path)
    assert path.stat().st_mode & 0o444 == 0o444  # a server may run as somebody else
    got = kind.load(path)
    assert replace(got, tensors={}, path="") == replace(kind.made, tensors={})
    assert got.tensors.keys() == kind.made.tensors.keys() == got.shapes.keys()
    for name, tensor in kind.made.tensors.items():
        assert torch.equal(got.tensors[name], tensor)


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -100])
def test_a_truncated_file(path: Path, any_kind: Kind, kept: int) -> None:
    any_kind.save(any_kind.made, path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "expected a" in refused(any_kind, path)


def test_what_is_no_file_of_tensors(path: Path, any_kind: Kind) -> None:
    """Nothing in it runs."""

    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (path.with_name("sprung"),))

    refused(any_kind, path)
    for write in (pickle.dump, torch.save):
        with path.open("wb") as file:
            write({**any_kind.made.tensors, "more": Trap()}, file)
        assert "expected a" in refused(any_kind, path)
    assert not path.with_name("sprung").exists()
    path.unlink(missing_ok=True)
    path.mkdir()
    refused(any_kind, path)


def test_any_other_safetensors_file(path: Path, kind: Kind) -> None:
    save_file(dict(kind.made.tensors), path)
    assert f"format: got None, expected '{kind.format_name}'" in refused(kind, path)
    save_file(load_file(path), path, {"format": kind.format_name})
    assert ": got None, expected 'str'" in refused(kind, path)
    replace(kind.made, num_layers="three").save(path)
    assert "num_layers: got 'three', expected 'int'" in refused(kind, path)


def test_another_kind(path: Path) -> None:
    KINDS["qfilter"].made.save(path)
    told = "kind: got 'qfilter', expected 'triattention'"
    assert told in refused(KINDS["triattention"], path)


def test_every_tensor_has_to_be_there_and_fit(path: Path, any_kind: Kind) -> None:
    def told(**changed: Tensor) -> str:
        changed = {**others, **changed}
        any_kind.save(replace(any_kind.made, tensors=changed), path)
        return refused(any_kind, path)

    for key, whole in any_kind.made.tensors.items():
        others = {k: t for k, t in any_kind.made.tensors.items() if k != key}
        assert f"'{key}" in told()
        for wrong in (whole[:-1].clone(), whole[..., None].clone(), whole[:0].clone()):
            found, expected = list(wrong.shape), list(whole.shape)
            text = f"shape of {key}: got {found}, expected {expected}"
            if ".layers.0." in key:  # of which other shapes may be read
                text = "shape of model.layers."
            assert text in told(**{key: wrong})
        half = f"dtype of {key}: got torch.float16, expected torch.float32"
        assert any_kind is RELEASED or half in told(**{key: whole.half()})
        for value in (torch.nan, torch.inf):
            bad = whole.clone()
            bad.view(-1)[-1] = value
            assert f"{key} is finite: got False, expected True" in told(**{key: bad})
    others = dict(any_kind.made.tensors)
    assert "'layers.1.norm'" in told(**{"layers.1.norm": torch.ones(8)})


@pytest.mark.parametrize(
    ("names", "change", "text"),
    [
        ("dms wgkv", {"num_layers": 4}, "missing tensors: got ['model.layers.3."),
        ("dms wgkv", {"num_layers": 2}, "unexpected tensors: got ['model.layers.2."),
        ("dms wgkv", {"num_layers": 10**12}, "got 1000000000000, expected 'at most "),
        ("dms wgkv", {"num_layers": 0}, "num_layers: got 0, expected 'at least 1'"),
        ("dms wgkv", {"window": 0}, "window: got 0, expected 'at least 1'"),
        ("dms wgkv", {"flavour": "gemma"}, "flavour: got 'gemma', expected 'llama or "),
        ("dms", {"shift": 2}, "shift: got 2, expected '0 or 1'"),
        ("dms", {"target_cr": 0.5}, "got 0.5, expected 'a number of at least 1'"),
        ("dms", {"alpha_scale": 0.0}, "got 0.0, expected 'a number above 0'"),
        ("dms", {"alpha_offset": torch.nan}, "got nan, expected 'a number'"),
        ("wgkv", {"rope_theta": torch.nan}, "got nan, expected 'a number above 0'"),
        ("wgkv", {"sinks": -1}, "sinks: got -1, expected 'at least 0'"),
        ("wgkv", {"threshold": 1.0}, "got 1.0, expected 'a number from 0 to"),
    ],
)
def test_fields_that_do_not_fit(
    path: Path, names: str, change: dict[str, Any], text: str
) -> None:
    for name in names.split():
        replace(KINDS[name].made, **change).save(path)
        told = refused(KINDS[name], path)
        assert text in told and (next(iter(change)) in told or "tensors" in text)


@pytest.mark.parametrize("name", ["dms", "wgkv"])
def test_stacking_has_an_inverse(name: str) -> None:
    made = KINDS[name].made
    again = made.unstacked(made.stacked())
    assert again.keys() == made.tensors.keys() == made.shapes.keys()
    assert all(torch.equal(again[key], t) for key, t in made.tensors.items())


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "flavour"])
def test_a_file_of_another_model(path: Path, kind: Kind, name: str) -> None:
    if name not in kind.model:
        name = next(reversed(kind.model))
    kind.made.save(path)
    found, other = kind.load(path), "llama" if name == "flavour" else 32
    check = found.check_model if hasattr(found, "check_model") else found.fits
    check(**kind.model)
    with pytest.raises(ValueError) as error:
        check(**{**kind.model, name: other})
    told = f"{path}: {name}: got {kind.model[name]!r}, expected {other!r}"
    assert str(error.value).endswith(told)


@pytest.mark.parametrize("name", ["triattention", "ams-qfilter"])
def test_a_policy_without_its_file(name: str) -> None:
    key = f"{name.rpartition('-')[2]}_calibration"
    for options in ({}, {key: None}, {key: ""}):
        with pytest.raises(ValueError) as error:
            registry.resolve(registry.parse(name), options)
        assert str(error.value).startswith(f"{key}: got ")
        assert "python -m training" in str(error.value)


@pytest.mark.parametrize("name", ["triattention", "qfilter"])
def test_a_scorer_checks_the_shape_of_its_model(path: Path, name: str) -> None:
    KINDS[name].made.save(path)
    scorer = factory.build(name, {f"{name}_calibration": str(path)}).scorer
    scorer.check_model(ModelShape(**HEADS))
    with pytest.raises(ValueError, match="num_heads: got 4, expected 8"):
        scorer.check_model(ModelShape(**{**HEADS, "num_heads": 8}))
    assert factory.build("rkv").scorer.check_model(ModelShape(1, 2, 3, 4)) is None
