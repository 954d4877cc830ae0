"""The command that trains DMS: what it writes, what it refuses."""

import json
import math
from pathlib import Path

import pytest
import torch

from training import dms
from training.dms import parse
from training.options import words_of
from vllm_kvpolicy.policies.admissions.dms.model import load

ROOT = Path(__file__).parents[2]
OPTIONS = [
    *("--window", "8", "--targets", "1.5", "2", "--rows-per-step", "2"),
    *("--steps-per-ratio", "4", "--hold-steps", "1", "--validation-rows", "2"),
    *("--learning-rate", "0.001", "--device", "cpu"),
]


def check_output(folder: Path, model: Path) -> None:
    content = json.loads((folder / "figures.json").read_text())
    assert content["model"] == str(model)
    assert content["settings"]["targets"] == [1.5, 2]
    assert [item["target"] for item in content["results"]] == [1.5, 2]
    for item in content["results"]:
        adapter = load(folder / item["file"])
        assert (adapter.window, adapter.shift, adapter.model) == (8, 1, str(model))
        assert (adapter.alpha_scale, adapter.alpha_offset) == (100, 5)
        assert adapter.target_cr == item["target"]
        assert adapter.kept_fraction == item["kept_fraction"]
        heads = torch.tensor(item["kept_by_head"])
        assert heads.shape == (adapter.num_layers, adapter.num_kv_heads)
        assert math.isclose(heads.mean(), item["kept_fraction"], rel_tol=1e-5)
        for name in ("soft_loss", "hard_loss", "window_loss"):
            assert item[name] >= 0


def test_the_command_with_a_text(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(32 + 7 * i * i % 95) for i in range(600)))
    command = [str(tiny_model), "--text", str(text), "--output", str(tmp_path / "out")]
    command += [*OPTIONS, "--length", "40"]
    dms.main(command)
    check_output(tmp_path / "out", tiny_model)
    first = load(tmp_path / "out" / "dms-2.safetensors")
    sizes = {"num_layers": 2, "num_kv_heads": 2, "hidden_size": 64}
    first.fits(flavour="qwen3", **sizes)
    told = capsys.readouterr()
    assert "ratio 2: " in told.out and "served" in told.out
    assert "adapter: 100%" in told.err  # the progress bar
    dms.main(command)  # nothing is left to do
    check_output(tmp_path / "out", tiny_model)
    again = load(tmp_path / "out" / "dms-2.safetensors")
    assert all(torch.equal(again.tensors[k], t) for k, t in first.tensors.items())


def test_the_command_with_the_reasoner(tmp_path: Path) -> None:
    model = ROOT / "reasoner" / "checkpoint"
    command = [str(model), "--reasoner", "--output", str(tmp_path), *OPTIONS]
    dms.main([*command, "--length", "200"])
    check_output(tmp_path, model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--window", "0"], "window: got 0, expected at least 1"),
        (
            ["--targets", "2", "2"],
            "targets: got (2.0, 2.0), expected increasing numbers",
        ),
        (["--learning-rate", "nan"], "learning_rate: got nan, expected a number"),
        (["--fade-steps", "5"], "fade_steps: only for --flavour borrowed"),
    ],
)
def test_options_that_are_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        dms.main(["model", "--output", "out", "--text", "file", *options])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (None, ["--validation-rows", "3"]),
        ("z", []),
        (None, ["--length", "41"]),
    ],
    ids=["rows held out", "text", "length"],
)
def test_other_rows_are_another_run(
    tmp_path: Path, change: str | None, options: list[str]
) -> None:
    """Rows that were held out would be trained on."""
    text = tmp_path / "text.txt"
    text.write_text("abc")
    command = ["model", "--text", str(text), "--output", "out", "--length", "40"]
    before, again = (words_of(parse([*command])) for _ in range(2))
    if change is not None:
        text.write_text(f"abc{change}")
    assert before == again != words_of(parse([*command, *options]))
