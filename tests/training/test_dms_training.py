"""Training of DMS on a tiny model: what it learns, and that it resumes."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from training import dms
from training.dms import Figures, measure, train
from training.dms_student import Retrofit, Settings, new_adapter, noise_of
from training.model import Base, load_base
from training.rows import Row, read_reasoner

ROOT = Path(__file__).parents[2]
WINDOW, TOKENS = 8, 64
QUICK = Settings(
    targets=(1.5, 2.5, 5.0),
    steps_per_ratio=40,
    hold_steps=20,
    window=WINDOW,
    compression_weight=25,
    rows_per_step=2,
    learning_rate=1e-3,
)
SHORT = replace(QUICK, targets=(2.0, 4.0), steps_per_ratio=2, hold_steps=0)  # 6 steps


def rows(count: int, seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(3, 99, (count, TOKENS), generator=generator)
    return [Row(ids) for ids in drawn]


def retrofit(base: Base, settings: Settings = SHORT) -> Retrofit:
    return Retrofit(settings, base, base, new_adapter(base))


def nothing(target: float) -> None:
    return None


@pytest.fixture(scope="module")
def trained(
    qwen3: Base, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[float, Figures], list[tuple[float, float]]]:
    """Figures by target, and in each step the mean decision and the wanted one."""
    model, found, means = retrofit(qwen3, QUICK), {}, []

    def reached(target: float) -> None:
        found[target] = measure(model, rows(8, 1))

    def spy(alphas: torch.Tensor, wanted: float) -> torch.Tensor:
        means.append((alphas.mean().item(), wanted))
        return compression(alphas, wanted)

    compression = dms.compression
    state = tmp_path_factory.mktemp("trained") / "state"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dms, "compression", spy)
        train(model, cycle(rows(32)), state, reached)
    return found, means


def test_decisions_track_what_is_wanted(trained: tuple) -> None:
    """From below: nothing pulls further than what is wanted."""
    _, means = trained
    assert len(means) == QUICK.rows_per_step * QUICK.steps
    got, wanted = torch.tensor(means).unflatten(0, (-1, 40)).mean(1).unbind(1)
    assert wanted[0] < 0.35 and wanted[-1] == pytest.approx(0.8, abs=1e-3)
    assert ((got > 0.8 * wanted) & (got < 1.2 * wanted)).all()
    assert (got[3:] < wanted[3:]).all()


def test_less_is_kept_for_a_higher_ratio(trained: tuple) -> None:
    found, _ = trained
    figures = [found[target] for target in QUICK.targets]
    for target, item in zip(QUICK.targets, figures, strict=True):
        assert 0.85 / target < item.kept_fraction < 1.65 / target
    ratios = [item.compression_ratio for item in figures]
    assert ratios == sorted(ratios)
    for name in ("soft_loss", "hard_loss"):
        losses = [getattr(item, name) for item in figures]
        assert losses == sorted(losses)


def test_trained_and_served_losses_are_close(trained: tuple) -> None:
    for figures in trained[0].values():
        gap = abs(figures.hard_loss - figures.soft_loss)
        assert gap < 0.15 * figures.window_loss


def test_trained_adapters_choose_better_than_those_of_chance(tmp_path: Path) -> None:
    """On the packaged model, since a random one has hardly a use for some tokens."""
    folder = ROOT / "reasoner" / "checkpoint"
    base = load_base(str(folder), "cpu", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = read_reasoner(folder, tokenizer, 250, 4)
    settings = Settings(
        targets=(2.0,),
        steps_per_ratio=10,
        hold_steps=10,
        window=WINDOW,
        rows_per_step=1,
        learning_rate=3e-4,
    )
    model = retrofit(base, settings)
    train(model, texts.shuffled(0), tmp_path / "state", nothing)
    figures = measure(model, texts.validation)
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
    model = retrofit(qwen3, QUICK)
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


def test_losses_are_weighed_by_what_counts(qwen3: Base) -> None:
    model = retrofit(qwen3, QUICK)
    first, second = rows(2)
    counts = torch.zeros(TOKENS, dtype=torch.bool)
    counts[-5:] = True
    some = Row(second.ids, counts)
    parts = [measure(model, [row]).window_loss for row in (first, some)]
    both = measure(model, [first, some]).window_loss
    want = (parts[0] * TOKENS + parts[1] * 5) / (TOKENS + 5)
    assert math.isclose(both, want, rel_tol=1e-4)
    assert parts[0] != pytest.approx(parts[1], rel=1e-2)


def test_ends_of_texts_weigh_nothing(qwen3: Base) -> None:
    model = retrofit(qwen3, QUICK)
    first, second = rows(2)
    ids = first.ids[:20].clone()
    ids[::2] = qwen3.ends[0]
    ended = Row(ids)
    parts = [measure(model, [row]).window_loss for row in (ended, second)]
    both = measure(model, [ended, second]).window_loss
    numbers = [int((row.ids != qwen3.ends[0]).sum()) for row in (ended, second)]
    want = (parts[0] * numbers[0] + parts[1] * numbers[1]) / sum(numbers)
    assert numbers[0] <= 10 and math.isclose(both, want, rel_tol=1e-4)
    assert parts[0] != pytest.approx(parts[1], rel=1e-2)


@pytest.mark.parametrize("flavour", ["qwen3", "llama"])
def test_the_adapter_learns_and_the_model_does_not(
    request: pytest.FixtureRequest, tmp_path: Path, flavour: str
) -> None:
    base = request.getfixturevalue(flavour)
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


@pytest.mark.parametrize(("after", "done", "reached"), [(2, 1, 2), (5, 2, 1)])
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(
    qwen3: Base, tmp_path: Path, after: int, done: int, reached: int
) -> None:
    whole, parts = retrofit(qwen3), retrofit(qwen3)
    train(whole, iter(rows(12)), tmp_path / "whole", nothing)
    state, found = tmp_path / "state", []
    with pytest.raises(Stopped):
        train(retrofit(qwen3), cut_off(after), state, nothing, save_steps=1)
    assert torch.load(state, weights_only=True)["step"] == done
    train(parts, iter(rows(12)), state, found.append, save_steps=1)
    assert len(found) == reached
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, parts.tensors()[name])


def test_the_state_is_saved_at_targets(qwen3: Base, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with pytest.raises(Stopped):
        train(retrofit(qwen3), cut_off(7), state, nothing, save_steps=100)
    assert torch.load(state, weights_only=True)["step"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 9), ("targets", (2.0, 5.0)), ("data", "other"), ("seed", 1)],
)
def test_a_run_of_other_settings_is_refused(
    qwen3: Base, tmp_path: Path, name: str, value: object
) -> None:
    state = tmp_path / "state"
    train(retrofit(qwen3), iter(rows(12)), state, nothing)
    other = retrofit(qwen3, replace(SHORT, **{name: value}))
    with pytest.raises(
        ValueError, match=f"{name}: got .* from an earlier run, expected"
    ):
        train(other, iter(rows(12)), state, nothing)


def one_step(
    base: Base, monkeypatch: pytest.MonkeyPatch, path: Path, texts: list, **change
) -> dict[str, torch.Tensor]:
    """Adam's means of the gradients of a first step, by tensor."""
    settings = replace(SHORT, rows_per_step=len(texts), **change)
    noise = noise_of(base, TOKENS, 1)
    monkeypatch.setattr(dms, "noise_of", lambda *_: noise)
    with pytest.raises(ValueError, match="rows: ran out at step 2 of 6"):
        train(retrofit(base, settings), iter(texts), path, nothing, save_steps=1)
    states = torch.load(path, weights_only=True)["optimizer"]["state"]
    return {name: states[i]["exp_avg"] for i, name in enumerate(("norm", "projection"))}


def test_a_step_takes_the_learning_rate_of_its_time(
    qwen3: Base, tmp_path: Path
) -> None:
    """The first step of Adam is as long as its rate, here one at rest."""
    settings = replace(SHORT, steps_per_ratio=0.1, hold_steps=2, hold_rate=0.5)
    assert settings.rate(1) == 0.5e-3
    model = retrofit(qwen3, settings)
    found = []
    plain = settings.__class__.rate

    def spy(self: Settings, step: int) -> float:
        found.append(step)
        return plain(self, step + 1)  # from the first that rests on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "rate", spy)
        with pytest.raises(ValueError, match="rows: ran out at step 2"):
            train(model, iter(rows(2)), tmp_path / "state", nothing)
    assert found == [0]
    assert model.weights.projection.abs().max().item() == pytest.approx(5e-4, rel=1e-2)


def test_gradients_are_cut(
    qwen3: Base, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dms, "LARGEST_GRADIENT", 1e-3)
    means = one_step(qwen3, monkeypatch, tmp_path / "state", rows(1))
    norm = torch.cat([mean.flatten() for mean in means.values()]).norm()
    assert norm.item() == pytest.approx(0.1 * 1e-3, rel=1e-3)  # the first of mean 0.9


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
