"""Training in two processes, on conversations, and resumed: the same as in one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from support.training_rows import ids
from training import dms, duo, options, run, wgkv
from training.run import Run, accelerator_for

ROOT = Path(__file__).parents[2]
COMMON = [
    *("--rows-per-step", "4", "--window", "8", "--validation-rows", "2"),
    *("--length", "60", "--device", "cpu", "--learning-rate", "0.001"),
    *("--save-steps", "1", "--gradient-checkpointing", "--dtype", "float32"),
]
DUO = ["--steps", "6", "--sinks", "1", "--loss-on", "answers"]
WGKV = ["--lambdas", "1.2", "--steps", "6", "--loss-on", "answers"]
ADAPTER = ["--targets", "4", "--steps-per-ratio", "2", "--loss-on", "answers"]
BORROWED = [
    *("--flavour", "borrowed", "--targets", "2", "2.5", "--steps-per-ratio", "2"),
    *("--fade-steps", "3"),
]


class Stopped(Exception):
    """What ends a run before its time."""


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Conversations of two answers each, of different lengths."""
    words = "".join(chr(32 + index % 95) for index in ids(60).tolist())
    path = tmp_path / "rows.jsonl"
    lines = []
    for index in range(14):
        messages = [
            {"role": "user", "content": words[index : index + 5]},
            {"role": "assistant", "content": words[2 * index : 2 * index + 12 + index]},
        ]
        lines.append(json.dumps({"messages": [*messages, *messages[::-1]][:3]}))
    path.write_text("\n".join(lines))
    return path


def command(model: Path, text: Path, output: Path, options: Sequence[str]) -> list[str]:
    given = [str(model), "--text", str(text), "--output", str(output)]
    return [*given, *COMMON, *options]


def stop_after(patch: pytest.MonkeyPatch, last: int) -> None:
    """Make runs end when the state of a step has been saved."""
    plain = Run._save

    def save(self: Run, step: int) -> None:
        plain(self, step)
        if step == last:
            raise Stopped

    patch.setattr(Run, "_save", save)


def in_two_processes(trainer: str, arguments: Sequence[str]) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launcher, "-m", "training", trainer]
    done = subprocess.run(
        [sys.executable, *words, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def state_of(folder: Path) -> dict:
    (path,) = folder.glob("*.state")
    return torch.load(path, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options", "file"),
    [
        (wgkv, WGKV, "wgkv-1.2.safetensors"),
        (dms, ADAPTER, "dms-4.safetensors"),
        (dms, BORROWED, "dms-2.5/model.safetensors"),
    ],
    ids=["wgkv", "adapter", "borrowed"],
)
def test_two_processes_give_what_one_gives(
    tiny_model: Path,
    tmp_path: Path,
    conversations: Path,
    module: ModuleType,
    options: list[str],
    file: str,
) -> None:
    """One has all four rows of a step; of two, which start later, each has two."""
    one, two = tmp_path / "one", tmp_path / "two"
    module.main(command(tiny_model, conversations, one, options))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 2)
        module.main(command(tiny_model, conversations, two, options))
    trainer = module.__name__.split(".")[-1]
    again = [*options, "--keep-teacher"]
    told = in_two_processes(trainer, command(tiny_model, conversations, two, again))
    assert told.count(f"wrote {two / Path(file).parts[0]}\n") == 1
    want, got = state_of(one), state_of(two)
    assert want["step"] == got["step"] == 6
    for name, tensor in want["weights"].items():
        torch.testing.assert_close(
            got["weights"][name], tensor, rtol=1e-4, atol=1e-6, msg=name
        )
    want, got = load_file(one / file), load_file(two / file)
    assert want.keys() == got.keys()
    figures = [
        json.loads((folder / "figures.json").read_text()) for folder in (one, two)
    ]
    found = [item.get("runs", item.get("results"))[-1] for item in figures]
    assert found[1]["hard_loss"] == pytest.approx(found[0]["hard_loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("module", "options"),
    [(wgkv, WGKV), (dms, ADAPTER), (dms, BORROWED), (duo, DUO)],
    ids=["wgkv", "adapter", "borrowed", "duo"],
)
def test_three_steps_and_three_are_six(
    tiny_model: Path,
    tmp_path: Path,
    conversations: Path,
    module: ModuleType,
    options: list[str],
) -> None:
    """With answers that count, and layers that are computed again."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    module.main(command(tiny_model, conversations, whole, options))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 3)
        module.main(command(tiny_model, conversations, parts, options))
    assert state_of(parts)["step"] == 3
    module.main(command(tiny_model, conversations, parts, options))
    want, got = state_of(whole), state_of(parts)
    assert got["step"] == want["step"] == 6
    for name, tensor in want["weights"].items():
        assert torch.equal(got["weights"][name], tensor), name
    for index, item in want["optimizer"]["state"].items():
        for name, tensor in item.items():
            assert torch.equal(got["optimizer"]["state"][index][name], tensor)


def machine(monkeypatch: pytest.MonkeyPatch, **facts: object) -> None:
    """Make both modules find these facts about the processes."""
    plain = {
        "num_processes": 1,
        "distributed_type": DistributedType.NO,
        "mixed_precision": "no",
        "device": torch.device("cpu"),
    }
    state = SimpleNamespace(**(plain | facts))
    state.state = state
    for module in (run, options):
        monkeypatch.setattr(module, "Accelerator", lambda **_: state)


def test_what_processes_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, num_processes=2)
    assert accelerator_for(4).gradient_accumulation_steps == 2
    with pytest.raises(ValueError, match="rows_per_step: got 3, .* of the 2 processes"):
        accelerator_for(3)
    machine(monkeypatch, distributed_type=DistributedType.FSDP)
    with pytest.raises(ValueError, match="launcher: got .*FSDP.*, expected plain"):
        accelerator_for(4)
