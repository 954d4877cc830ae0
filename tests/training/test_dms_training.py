"""Training of DMS on a tiny model: what it learns, and that it resumes."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from support.training_rows import TOKENS, rows
from training import dms
from training.dms import measure, train
from training.dms_student import Retrofit, Settings, new_adapter, noise_of
from training.model import Base, load_base
from training.options import words_of
from training.rows import Row, read_reasoner
from vllm_kvpolicy.policies.admissions.dms.model import load

ROOT = Path(__file__).parents[2]
WINDOW = 8
SHORT = Settings(targets=(2.0, 4.0), steps_per_ratio=2, hold_steps=0, window=WINDOW)
SHORT = replace(SHORT, compression_weight=25, rows_per_step=2, learning_rate=1e-3)
"""Of 6 steps."""


def retrofit(base: Base, settings: Settings = SHORT) -> Retrofit:
    return Retrofit(settings, base, base, new_adapter(base))


def nothing(target: float) -> None:
    return None


def test_trained_adapters_choose_better_than_those_of_chance(tmp_path: Path) -> None:
    """On the packaged model, since a random one has hardly a use for some tokens."""
    folder = ROOT / "reasoner" / "checkpoint"
    base = load_base(str(folder), "cpu", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = read_reasoner(folder, tokenizer, 160, 3)
    settings = Settings(targets=(2.0,), steps_per_ratio=14, hold_steps=10)
    settings = replace(settings, window=WINDOW, rows_per_step=1, learning_rate=3e-4)
    model = retrofit(base, settings)
    train(model, texts.shuffled(0), tmp_path / "state", nothing)
    figures = measure(model, texts.validation)
    assert 0.85 / 2 < figures.kept_fraction < 1.65 / 2
    gap = abs(figures.hard_loss - figures.soft_loss)  # served as trained
    assert gap < 0.15 * figures.window_loss
    chance = retrofit(base, settings)
    drawn = torch.randn(6, 2, 320, generator=torch.Generator().manual_seed(0))
    chance.weights.projection.data = drawn
    logits = []
    with torch.no_grad():
        for row in texts.validation:
            student = chance.dropping(least=torch.inf)
            base.hidden(row.ids, student)
            logits.append(torch.stack(list(student.logits.values())))
    # Its offset is chosen so that as much is kept, or a little more.
    level = torch.cat(logits, -1).quantile(figures.kept_fraction + 0.02).item()
    other = replace(settings, alpha_offset=settings.alpha_offset + level)
    by_chance = measure(replace(chance, settings=other), texts.validation)
    assert by_chance.kept_fraction > figures.kept_fraction - 0.05
    assert figures.hard_loss < 0.5 * by_chance.hard_loss


def test_figures_by_hand(qwen3: Base) -> None:
    model = retrofit(qwen3)
    drawn = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0))
    model.weights.projection.data = 0.1 * drawn
    (row,) = rows(1, 2)
    got = measure(model, [row])
    ways = [
        model.dropping(noise=noise_of(qwen3, TOKENS, 42, -1, 0)),
        model.dropping(),
        model.dropping(least=-torch.inf),
    ]
    with torch.no_grad():
        wanted = qwen3.logits(qwen3.hidden(row.ids)).log_softmax(-1)
        losses = []
        for student in ways:
            own = qwen3.logits(qwen3.hidden(row.ids, student)).log_softmax(-1)
            losses.append((own.exp() * (own - wanted)).sum(-1).mean().item())
    found = (got.soft_loss, got.hard_loss, got.window_loss)
    assert found == pytest.approx(losses, rel=1e-3)
    logits = torch.cat([ways[1].logits[0], ways[1].logits[1]])
    keep = logits[..., 1:] <= 0  # of all tokens but the last
    assert 0.1 < keep.float().mean() < 0.9
    torch.testing.assert_close(torch.tensor(got.kept_by_head), keep.float().mean(-1))
    assert math.isclose(got.kept_fraction, keep.float().mean(), rel_tol=1e-5)
    cached = keep[..., :-WINDOW].float().sum(-1) + WINDOW + 1
    assert math.isclose(got.cached_fraction, cached.mean() / TOKENS, rel_tol=1e-5)
    assert math.isclose(got.compression_ratio, TOKENS / cached.mean(), rel_tol=1e-5)
    assert got.tokens == TOKENS


@pytest.mark.parametrize("of_answers", [True, False], ids=["answers", "ends"])
def test_losses_are_weighed_by_what_counts(qwen3: Base, of_answers: bool) -> None:
    """Answers, if only they count; never the ends of texts."""
    model = retrofit(qwen3)
    first, second = rows(2)
    if of_answers:
        counts = torch.zeros(TOKENS, dtype=torch.bool)
        counts[-5:] = True
        some, weight = Row(second.ids, counts), 5
    else:
        ids = second.ids[:20].clone()
        ids[::2] = qwen3.ends[0]
        some, weight = Row(ids), int((ids != qwen3.ends[0]).sum())
    parts = [measure(model, [row]).window_loss for row in (first, some)]
    both = measure(model, [first, some]).window_loss
    whole = int((first.ids != qwen3.ends[0]).sum())
    want = (parts[0] * whole + parts[1] * weight) / (whole + weight)
    assert math.isclose(both, want, rel_tol=1e-4)
    assert parts[0] != pytest.approx(parts[1], rel=1e-2)


def test_the_adapter_learns_and_the_model_does_not(base: Base, tmp_path: Path) -> None:
    before = {name: t.clone() for name, t in base.model.state_dict().items()}
    model = retrofit(base)
    train(model, iter(rows(12)), tmp_path / "state", nothing)
    for name, tensor in retrofit(base).tensors().items():
        assert ((model.tensors()[name] - tensor).abs().amax(-1) > 1e-4).all()
    assert not any(t.requires_grad for t in base.model.parameters())
    for name, tensor in base.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_targets_are_reached_in_turn(qwen3: Base, tmp_path: Path) -> None:
    found = []
    train(retrofit(qwen3), iter(rows(12)), tmp_path / "state", found.append)
    assert found == [2.0, 4.0]
    again = []
    train(retrofit(qwen3), iter(rows(12)), tmp_path / "state", again.append)
    assert again == []  # the run is done


class Stopped(Exception):
    """What ends a run before its time."""


def cut_off(after: int) -> Iterator[Row]:
    yield from islice(rows(12), after)
    raise Stopped


def test_the_state_is_saved_at_targets(qwen3: Base, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with pytest.raises(Stopped):
        train(retrofit(qwen3), cut_off(7), state, nothing, save_steps=100)
    assert torch.load(state, weights_only=True)["step"] == 2


def after_one_step(base: Base, state: Path) -> dict:
    """The state of a run that was cut off after its first step."""
    settings = replace(SHORT, rows_per_step=1)
    with pytest.raises(ValueError, match="rows: ran out at step 2 of 6"):
        train(retrofit(base, settings), iter(rows(1)), state, nothing, save_steps=1)
    return torch.load(state, weights_only=True)


def test_a_step_takes_the_learning_rate_of_its_time(
    qwen3: Base, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first step of Adam is as long as its rate."""
    monkeypatch.setattr(Settings, "rate", lambda self, step: 5e-4)
    projection = after_one_step(qwen3, tmp_path / "state")["weights"]["projection"]
    assert projection.abs().max().item() == pytest.approx(5e-4, rel=1e-2)


def test_gradients_are_cut(
    qwen3: Base, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dms, "LARGEST_GRADIENT", 1e-3)
    optimizer = after_one_step(qwen3, tmp_path / "state")["optimizer"]
    means = [each["exp_avg"].flatten() for each in optimizer["state"].values()]
    norm = torch.cat(means).norm().item()
    assert norm == pytest.approx(0.1 * 1e-3, rel=1e-3)  # the first of mean 0.9


def test_noise_differs_by_step_and_row(
    qwen3: Base, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = []

    def spy(base: Base, num_tokens: int, *place: int) -> torch.Tensor:
        places.append(place)
        return noise_of(base, num_tokens, *place)

    monkeypatch.setattr(dms, "noise_of", spy)
    train(retrofit(qwen3), iter(rows(12)), tmp_path / "state", nothing)
    assert places == [(42, step, row) for step in range(6) for row in range(2)]


def test_a_model_in_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    """As on a GPU: the adapter stays in float32."""
    half = load_base(str(tiny_model), "cpu", torch.bfloat16)
    model = retrofit(half)
    train(model, iter(rows(12)), tmp_path / "state", nothing)
    assert {t.dtype for t in model.tensors().values()} == {torch.float32}
    assert half.hidden(rows(1)[0].ids, model.dropping()).dtype == torch.bfloat16
    assert measure(model, rows(2, 1)).hard_loss < 10


OPTIONS = [
    *("--window", "8", "--targets", "1.5", "2", "--rows-per-step", "2"),
    *("--steps-per-ratio", "4", "--hold-steps", "1", "--validation-rows", "2"),
    *("--learning-rate", "0.001", "--device", "cpu", "--dtype", "float32"),
]


def test_the_command_writes_adapters_and_their_figures(tmp_path: Path) -> None:
    model = ROOT / "reasoner" / "checkpoint"
    command = [str(model), "--reasoner", "--output", str(tmp_path), *OPTIONS]
    dms.main([*command, "--length", "120"])
    content = json.loads((tmp_path / "figures.json").read_text())
    assert content["model"] == str(model)
    assert [item["target"] for item in content["results"]] == [1.5, 2]
    for item in content["results"]:
        adapter = load(tmp_path / item["file"])
        assert (adapter.window, adapter.shift, adapter.model) == (8, 1, str(model))
        assert (adapter.alpha_scale, adapter.alpha_offset) == (100, 5)
        assert adapter.target_cr == item["target"]
        assert adapter.kept_fraction == item["kept_fraction"]
        heads = torch.tensor(item["kept_by_head"])
        assert heads.shape == (adapter.num_layers, adapter.num_kv_heads)
        assert math.isclose(heads.mean(), item["kept_fraction"], rel_tol=1e-5)


@pytest.mark.parametrize(
    ("more", "options"),
    [("", ["--validation-rows", "3"]), ("z", []), ("", ["--length", "41"])],
    ids=["rows held out", "text", "length"],
)
def test_other_rows_are_another_run(
    tmp_path: Path, more: str, options: list[str]
) -> None:
    """Rows that were held out would be trained on."""
    text = tmp_path / "text.txt"
    text.write_text("abc")
    command = ["model", "--text", str(text), "--output", "out", "--length", "40"]
    before, again = (words_of(dms.parse([*command])) for _ in range(2))
    text.write_text(f"abc{more}")
    assert before == again != words_of(dms.parse([*command, *options]))
