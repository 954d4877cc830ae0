"""What `vllm-kvpolicy trace plot` writes, and what it refuses."""

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.made_traces import make_event, rows, run_request, write_trace
from vllm_kvpolicy.__main__ import main
from vllm_kvpolicy.commands import trace as command

HEADS = {"selected": rows([0, 6, 7, 8, 9], [6, 7, 8, 9]), "survivors": rows([0], [])}


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """A policy with segments, one without, one request each."""
    mass = np.linspace(0, 1, 10, dtype=np.float32)
    notes = {
        "mass": np.stack([mass, mass**4])[None],
        "segments": np.array([[[[0, 4], [4, 10]], [[0, 9], [9, 9]]]], np.int32),
        "quotas": np.array([[[2, 3], [4, 0]]], np.int32),
        "lse_drop": np.array([[0.25, 0.5]], np.float32),
    }
    ams = make_event(
        policy="ams-tova", held=rows(range(10), range(1, 10)), notes=notes, **HEADS
    )
    events = run_request(lambda held: held[::2], events=3, shape=(10, 1))
    return write_trace(tmp_path_factory.mktemp("made") / "run 1", [ams, *events])


@pytest.fixture(scope="module")
def drawn(trace: Path) -> Path:
    """The plots of the trace, drawn by the command."""
    main(["trace", "plot", str(trace)])
    return trace / "plots"


def test_every_figure_is_a_picture_and_on_the_page(drawn):
    page = (drawn / "index.html").read_text()
    files = list(drawn.glob("*.png"))
    assert page.count("<img ") == len(files)
    for file in files:
        assert f'id="{file.stem}"' in page and f"{file.name}</figcaption>" in page
        with Image.open(BytesIO(file.read_bytes())) as image:
            assert min(image.size) >= 200
            assert len(image.convert("RGB").getcolors(2**24)) > 10
    assert "http" not in page, "the page loads nothing"
    assert "<h1>What events keep: run 1</h1>" in page
    assert "LSE drop per event, nats" in page and "&lt;= 5 % kept" in page


def test_figures_follow_from_what_was_recorded(drawn):
    names = {file.stem for file in drawn.glob("*.png")}
    spread = (0, 1, 3, 4, 5, 6, 8, 9)  # 8 of 10 layers
    of_ams = ("head_budget", "lse_drop", "kept-layer0", "segments-layer0")
    expected = {"retention", "snapkv-head_budget", *(f"ams-tova-{x}" for x in of_ams)}
    assert names == expected | {f"snapkv-kept-layer{layer}" for layer in spread}


def test_the_longest_request_is_drawn_unless_another_is_named(tmp_path):
    short = make_event()
    long = run_request(lambda held: held[::2], events=2, shape=(1, 1))
    folder = write_trace(tmp_path, [short, *long])
    assert command.read_policies(folder)["snapkv"].events[0].request_id == "snapkv-0"
    policy = command.read_policies(folder, "r0")["snapkv"]
    assert [event.request_id for event in policy.events] == ["r0"]
    assert (policy.count, policy.sums["head_budget"].item()) == (3, 5 + 64 + 64)
    with pytest.raises(ValueError, match=r"'r1', expected one of \['r0', 'snapkv-0'\]"):
        command.read_policies(folder, "r1")


def test_a_preempted_request_is_drawn_from_its_second_start(tmp_path):
    events = run_request(lambda held: held[::2], events=3)
    folder = write_trace(tmp_path, events + events[:2])
    drawn = command.read_policies(folder)["snapkv"]
    assert [event.ordinal for event in drawn.events] == [0, 1]
    assert drawn.count == 5


def test_layers_are_drawn_as_asked(trace, tmp_path):
    names = command.plot(trace, tmp_path, request="snapkv-0", layers=[7])
    assert [name for name in names if "layer" in name] == ["snapkv-kept-layer7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0", "1"], "layers: got 1, expected 0 to 0"),
        (["--request", "x"], "request: got 'x', expected one of ['r0']"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, capsys, arguments, message):
    write_trace(tmp_path, [make_event()])
    assert main(["trace", "plot", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["trace", "plot", str(write_trace(tmp_path, [make_event()]))]) == 2
    message = "plots need matplotlib: pip install matplotlib\n"
    assert capsys.readouterr().err.endswith(f"error: {message}")
    assert not (tmp_path / "plots").exists()
