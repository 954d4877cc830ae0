"""Figures of accuracy runs show the numbers."""

from functools import cache

import pytest

from benchmarks.report import __main__ as command
from benchmarks.report import accuracy_figures, records
from support.report_data import record

NAMES = ["accuracy-by-policy", "accuracy-by-budget", "repetition-by-budget"]
NAMES += ["accuracy-by-kv_read", "accuracy-by-kv_peak"]
VOTES = ["votes-by-kv_read", "votes-by-kv_peak"]
VOTES += ["passes-by-kv_read", "passes-by-kv_peak"]


def drawn(made: dict, about: str = "", score: str = "answer") -> dict:
    return dict(accuracy_figures.draw_accuracy(made, about, score))


@cache
def small(samples: int = 1) -> dict:
    """The figures of a small record, drawn once."""
    return drawn(record(samples=samples))


def bars(panel, name: str, across: int) -> list[tuple[float, float, float]]:
    """Return (value, low, high) of a policy's points; bars go `across` axis 0 or 1."""
    return [
        (value, *stem[:, across])
        for container in panel.containers
        if container.get_label() == name
        for value, stem in zip(
            container[0].get_data()[across], container[2][0].get_segments(), strict=True
        )
    ]


def panel_lines(figure) -> list[dict]:
    """Return the named lines of each panel: label -> x and y."""
    return [
        {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in panel.get_lines()
            if not str(line.get_label()).startswith("_")
        }
        for panel in figure.axes
    ]


def test_figures_follow_from_what_is_on_file():
    assert list(small()) == NAMES
    assert list(small(samples=4)) == NAMES + VOTES
    older = records.read(command.RESULTS / "accuracy_catalogue.json.xz")
    assert list(drawn(older)) == ["accuracy-by-policy"]


def test_accuracy_by_budget_has_points_and_intervals():
    figure = small()["accuracy-by-budget"]
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles == ["all families", "a:1", "b:2"]
    panel = figure.axes[1]
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["96", "128"]
    for found in bars(panel, "tova", across=1):
        assert found == pytest.approx((50, 15, 85), abs=0.05)
    # Beside each other: `ams-tova` is better, so it stands to the left.
    lines_of = {c.get_label(): c[0].get_xdata() for c in panel.containers}
    assert list(lines_of["ams-tova"]) == [-0.025, 0.975]
    assert list(lines_of["tova"]) == [0.025, 1.025]
    full = panel_lines(figure)[1]["full"]
    assert full[1] == [100.0, 100.0]


def test_figures_of_another_score_show_its_means_and_intervals():
    made = record(samples=4)
    score = {"mean": 0.25, "low": 0.125, "high": 0.5}
    made["summary"] = [row | {"lines": score} for row in made["summary"]]
    figures = drawn(made, score="lines")
    axes = ("policy", "budget", "kv_read", "kv_peak")
    assert list(figures) == [f"lines-by-{axis}" for axis in axes]
    panel = figures["lines-by-budget"].axes[0]
    assert panel.get_ylabel() == "lines right, %"
    for found in bars(panel, "tova", across=1):
        assert found == pytest.approx((25, 12.5, 50))
    costs = panel_lines(figures["lines-by-kv_read"])[0]
    assert set(costs["tova"][1]) == {25.0}
    with pytest.raises(ValueError, match="a file with the score 'prefix' of full"):
        drawn(made, score="prefix")


def test_costs_are_those_on_file():
    made = record()
    pooled = [row for row in made["summary"] if row["family"] == "all"]
    found = panel_lines(small()["accuracy-by-kv_read"])[0]
    ams = [row["kv_read"] for row in pooled if row["policy"] == "ams-tova"]
    assert found["ams-tova"] == (ams, [75.0, 75.0])
    assert found["full"][1] == [100.0]


def test_the_front_is_drawn_in_steps_of_the_measure():
    made = record(samples=4)
    for row in made["votes"]:
        row["passed"] = 1.0 if row["width"] == 4 and row["share"] == 1.0 else 0.5
    panel = drawn(made)["passes-by-kv_read"].axes[1]
    (step,) = [
        line
        for line in panel.get_lines()
        if line.get_drawstyle() == "steps-post" and line.get_color() == "black"
    ]
    own = [r for r in made["votes"] if (r["policy"], r["family"]) == ("full", "a:1")]
    last = max(own, key=lambda row: row["kv_read"])
    assert list(step.get_ydata()) == [50.0, 100.0]
    assert list(step.get_xdata()) == [min(r["kv_read"] for r in own), last["kv_read"]]
