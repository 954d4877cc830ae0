"""DMS with borrowed channels: how they fade, what is trained, what is written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.training_rows import TOKENS, rows
from training import dms
from training.dms import measure, save_checkpoint, train
from training.dms_student import BORROWED, Retrofit, Settings
from training.model import Base, load_base

SETTINGS = replace(BORROWED, targets=(2.0,), steps_per_ratio=3, fade_steps=3)
SETTINGS = replace(SETTINGS, window=6, rows_per_step=1, learning_rate=1e-3)
FLAVOURS = pytest.mark.parametrize("flavour", ["qwen3", "llama"])


def nothing(target: float) -> None:
    return None


def learner(folder: Path) -> Base:
    return load_base(str(folder), "cpu", torch.float32, trained=True)


@pytest.fixture
def retrofit(
    request: pytest.FixtureRequest, tiny_model: Path, tiny_llama: Path, flavour: str
) -> Retrofit:
    folder = {"qwen3": tiny_model, "llama": tiny_llama}[flavour]
    teacher = request.getfixturevalue(flavour)
    return Retrofit(SETTINGS, teacher, learner(folder))


@FLAVOURS
@torch.no_grad()
def test_a_channel_that_has_not_faded_changes_nothing(retrofit: Retrofit) -> None:
    (row,) = rows(1)
    got = retrofit.student.hidden(row.ids, retrofit.dropping(fade=1.0))
    want = retrofit.teacher.hidden(row.ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    half = retrofit.student.hidden(row.ids, retrofit.dropping(fade=0.5))
    assert (half - want).abs().max() > 1e-3


@FLAVOURS
@torch.no_grad()
def test_a_channel_that_has_faded_has_no_influence(retrofit: Retrofit) -> None:
    """Whatever is added to it where it comes from, and with nothing dropped yet."""
    (row,) = rows(1)
    student = retrofit.student
    passes = (retrofit.dropping(fade=0.0), retrofit.dropping(least=torch.inf))
    want = [student.hidden(row.ids, item) for item in passes]
    torch.testing.assert_close(want[0], want[1], rtol=1e-4, atol=1e-4)

    size, heads = student.head_dim, 4

    def disturb(_: object, __: tuple, out: torch.Tensor) -> torch.Tensor:
        changed = out.clone().view(1, TOKENS, heads, size)
        changed[:, :, ::2, -1] += 3.0
        return changed.view(out.shape)

    name = "q_norm" if student.flavour == "qwen3" else "q_proj"
    modules = [getattr(layer.self_attn, name) for layer in student.decoder.layers]
    handles = [module.register_forward_hook(disturb) for module in modules]
    got = student.hidden(row.ids, retrofit.dropping(fade=0.0))
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-4)
    seen = student.hidden(row.ids, retrofit.dropping(fade=0.5))
    assert (seen - want[0]).abs().max() > 1e-3
    for handle in handles:
        handle.remove()


@FLAVOURS
@torch.no_grad()
def test_the_channel_decides(retrofit: Retrofit) -> None:
    """The value in front of RoPE, of the first of two query heads, last channel."""
    student = retrofit.student
    name = "q_norm" if student.flavour == "qwen3" else "q_proj"
    made = []
    module = getattr(student.decoder.layers[1].self_attn, name)
    handle = module.register_forward_hook(lambda _, __, out: made.append(out))
    item = retrofit.dropping()
    student.hidden(rows(1)[0].ids, item)
    handle.remove()
    value = made[0].view(1, TOKENS, 4, student.head_dim)[:, :, ::2, -1]
    want = value.transpose(1, 2) * 100.0 - 5.0
    torch.testing.assert_close(item.logits[1], want, rtol=1e-3, atol=1e-2)
    retrofit.clear_channels()
    item = retrofit.dropping()
    student.hidden(rows(1)[0].ids, item)
    for logits in item.logits.values():
        torch.testing.assert_close(logits, torch.full_like(logits, -5.0))


@FLAVOURS
def test_all_weights_learn_and_the_teacher_does_not(
    retrofit: Retrofit, tmp_path: Path
) -> None:
    teacher = retrofit.teacher.model
    before = {name: t.clone() for name, t in teacher.state_dict().items()}
    train(retrofit, iter(rows(6)), tmp_path / "state", nothing)
    for name, tensor in retrofit.tensors().items():
        assert not torch.equal(tensor, before[name]), name
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not any(t.requires_grad for t in teacher.parameters())


@pytest.mark.parametrize("flavour", ["qwen3"])
def test_phases_follow_each_other(
    retrofit: Retrofit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fading to nothing, then decisions that start where nothing is dropped."""
    made, plain = [], Retrofit.dropping

    def spy(self: Retrofit, **how: object):
        made.append(plain(self, **how))
        return made[-1]

    monkeypatch.setattr(Retrofit, "dropping", spy)
    train(retrofit, iter(rows(6)), tmp_path / "state", nothing)
    assert [item.fade for item in made[:3]] == pytest.approx([2 / 3, 1 / 3, 0])
    assert [item.fade for item in made[3:]] == [None] * 3
    assert [item.noise is None for item in made] == [True] * 3 + [False] * 3
    first = made[3].logits
    assert all((logits + 5).abs().max() < 1e-3 for logits in first.values())


def test_the_command(tiny_model: Path, tmp_path: Path, on_text: list[str]) -> None:
    command = [
        *on_text,
        *("--flavour", "borrowed", "--targets", "2", "2.5", "--steps-per-ratio", "3"),
        *("--fade-steps", "2", "--rows-per-step", "1", "--window", "6"),
        *("--length", "40", "--validation-rows", "2", "--device", "cpu"),
        *("--learning-rate", "0.001", "--dtype", "float32"),
    ]
    dms.main(command)
    content = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert [item["file"] for item in content["results"]] == ["dms-2", "dms-2.5"]
    folder = tmp_path / "out" / "dms-2.5"
    config = json.loads((folder / "config.json").read_text())
    plain = json.loads((tiny_model / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    for key in ("model_type", "hidden_size", "vocab_size", "eos_token_id"):
        assert config[key] == plain[key]
    assert (config["dms_window_size"], config["dms_cr"]) == (6, 2.5)
    assert (config["dms_alpha_scale"], config["dms_initial_alpha_offset"]) == (100, 5)
    assert config["dms_separate_alpha"] is False
    other = json.loads((tmp_path / "out" / "dms-2" / "config.json").read_text())
    assert other["dms_cr"] == 2 and isinstance(other["dms_cr"], int)
    assert (folder / "tokenizer.json").is_file()
    state = torch.load(tmp_path / "out" / "dms-borrowed.state", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, state["weights"][name])
    teacher = load_base(str(tiny_model), "cpu", torch.float32)
    student = load_base(str(folder), "cpu", torch.float32)
    rows_of = dms.rows_of(dms.parse(command)).validation
    settings = dms.settings_of(dms.parse(command), Settings)
    found = measure(Retrofit(settings, teacher, student), rows_of)
    assert found.hard_loss == pytest.approx(content["results"][1]["hard_loss"])


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "reasoner" / "checkpoint"
    teacher = load_base(str(source), "cpu", torch.float32)
    retrofit = Retrofit(replace(SETTINGS, window=32), teacher, learner(source))
    save_checkpoint(tmp_path, retrofit, str(source), 4.0)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], tensor)
