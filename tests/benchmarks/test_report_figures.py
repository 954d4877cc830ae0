"""Figures of accuracy runs: they show the numbers, and can be read by themselves."""

import sys
from functools import cache

import pytest
from PIL import Image

from benchmarks.accuracy import summary
from benchmarks.report import __main__ as command
from benchmarks.report import accuracy_figures, lines, panels, records
from benchmarks.report.cost_figures import by_cost
from support.figure_checks import check_readable, panel_lines
from support.report_data import FAMILIES, SETTINGS, large_record, record
from support.report_data import lines as answers

NAMES = [
    "accuracy-by-policy",
    "accuracy-by-budget",
    "repetition-by-budget",
    "accuracy-by-kv_read",
    "accuracy-by-kv_peak",
]
VOTES = [
    "votes-by-kv_read",
    "votes-by-kv_peak",
    "passes-by-kv_read",
    "passes-by-kv_peak",
]


def drawn(made: dict, about: str = "", score: str = "answer") -> dict:
    return dict(accuracy_figures.draw_accuracy(made, about, score))


@cache
def small(samples: int = 1) -> dict:
    """The figures of a small record, drawn once."""
    return drawn(record(samples=samples))


@pytest.fixture(scope="module")
def large() -> dict:
    """The figures of a summary of the size of the standard grid."""
    return drawn(large_record())


def bars(panel, name: str, across: int) -> list[tuple[float, float, float]]:
    """Return (value, low, high) of a policy's points; bars go `across` axis 0 or 1."""
    return [
        (value, *stem[:, across])
        for container in panel.containers
        if container.get_label() == name
        for value, stem in zip(
            container[0].get_data()[across],
            container[2][0].get_segments(),
            strict=True,
        )
    ]


def test_figures_follow_from_what_is_on_file():
    assert list(small()) == NAMES
    assert list(small(samples=4)) == NAMES + VOTES
    older = records.read(command.RESULTS / "accuracy_catalogue.json.xz")
    assert list(drawn(older)) == ["accuracy-by-policy"]


def test_small_figures_can_be_read_without_the_text():
    for figure in small(samples=4).values():
        check_readable(figure)


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_of_the_standard_grid_can_be_read(large, tmp_path, name):
    check_readable(large[name])
    panels.save(large[name], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size < 150_000


def test_the_caption_says_what_was_measured():
    made = record(samples=4)
    made["settings"] = made["settings"] | {"model": "tiny", "temperature": 0.8}
    for figure in drawn(made).values():
        text = " ".join(t.get_text().replace("\n", " ") for t in figure.texts)
        assert "model tiny, 4 questions per family, temperature 0.8" in text
        assert "an event every 64 tokens" in text
    (figure, *_) = drawn(made, "0.8 M parameters").values()
    assert "Setting: 0.8 M parameters, 4 questions" in figure.texts[1].get_text()
    made["summary"][0]["problems"] = 3
    made["settings"]["temperature"] = 0.0
    said = accuracy_figures.setting_of(made, "x")
    assert "3 to 4 questions per family, greedy decoding" in said


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
    assert list(figures) == [
        "lines-by-policy",
        "lines-by-budget",
        "lines-by-kv_read",
        "lines-by-kv_peak",
    ]
    for figure in figures.values():
        check_readable(figure)
        said = " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
        assert said.startswith("Right lines by") and "lines that stand in" in said
    panel = figures["lines-by-budget"].axes[0]
    assert panel.get_ylabel() == "lines right, %"
    for found in bars(panel, "tova", across=1):
        assert found == pytest.approx((25, 12.5, 50))
    costs = panel_lines(figures["lines-by-kv_read"])[0]
    assert set(costs["tova"][1]) == {25.0}
    with pytest.raises(ValueError, match="a file with the score 'prefix' of full"):
        drawn(made, score="prefix")


def test_accuracy_by_policy_names_every_policy_and_budget():
    first, panel, _ = small()["accuracy-by-policy"].axes
    names = [tick.get_text() for tick in first.get_yticklabels()]
    assert names == ["ams-tova", "tova"] and first.yaxis_inverted()
    found = bars(panel, "tova", across=0)
    assert len(found) == 2
    for each in found:
        assert each == pytest.approx((50, 15, 85), abs=0.05)
    places = [c[0].get_ydata()[0] for c in panel.containers if c.get_label() == "tova"]
    assert places == pytest.approx([0.85, 1.15])


def test_repetition_is_that_of_8_grams():
    figure = small()["repetition-by-budget"]
    (container,) = [c for c in figure.axes[0].containers if c.get_label() == "tova"]
    assert list(container[0].get_ydata()) == [10.0, 10.0]
    assert container[2] == (), "no interval"


def test_costs_are_those_on_file():
    made = record()
    pooled = [row for row in made["summary"] if row["family"] == "all"]
    found = panel_lines(small()["accuracy-by-kv_read"])[0]
    ams = [row["kv_read"] for row in pooled if row["policy"] == "ams-tova"]
    assert found["ams-tova"] == (ams, [75.0, 75.0])
    assert found["full"][1] == [100.0]


def test_rows_without_costs_are_left_out_and_change_no_colour():
    made = record(samples=4)
    for row in (*made["summary"], *made["votes"]):
        if row["policy"] == "ams-tova":
            row["kv_read"] = row["kv_peak"] = None
    figures = drawn(made)
    assert list(figures) == NAMES + VOTES
    panel = figures["accuracy-by-kv_read"].axes[0]
    assert set(panel_lines(figures["accuracy-by-kv_read"])[0]) == {"full", "tova"}
    colours = {line.get_label(): line.get_color() for line in panel.get_lines()}
    assert colours["tova"] == lines.styles_of(made["summary"])["tova"].color
    alone = [row for row in made["summary"] if row["policy"] != "ams-tova"]
    assert lines.styles_of(alone)["tova"].color != colours["tova"]


def test_of_many_policies_the_best_have_colours_and_one_control():
    rows = large_record()["summary"]
    for row in rows:
        row["policy"] = {"p9": "random"}.get(row["policy"], row["policy"])
    styles = lines.styles_of(rows)
    assert list(styles) == ["full", *(f"p{i}" for i in range(9)), "random"] + [
        f"p{i}" for i in range(10, 16)
    ]
    shown = [name for name, style in styles.items() if style.is_shown]
    assert shown == ["full", "p0", "p1", "p2", "p3", "p4", "p5", "random"]
    looks = [(style.color, style.marker) for style in styles.values() if style.is_shown]
    assert len(set(looks)) == len(looks)
    assert "the 6 policies with the highest mean; grey: the other 9, which x-by-" in (
        lines.note_on_grey(rows, "x")
    )
    assert lines.note_on_grey(record()["summary"], "x") == ""
    figure = by_cost(rows, "kv_peak", "")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == shown


def test_lines_of_several_intervals_are_told_apart():
    rows = record()["summary"]
    rows += [row | {"interval": 32} for row in rows if row["policy"] == "tova"]
    assert lines.ranked(rows) == [
        "ams-tova, every 64",
        "tova, every 32",
        "tova, every 64",
    ]


def test_votes_are_marked_by_budget_length_and_width():
    made = record(samples=4)
    panel = small(samples=4)["votes-by-kv_peak"].axes[1]
    marks = [
        (
            line.get_label(),
            line.get_marker(),
            line.get_fillstyle(),
            line.get_markersize(),
        )
        for line in panel.get_lines()
        if not line.get_label().startswith("_")
    ]
    # Four equal samples: wider votes are dearer and no better. No answer is as short as
    # a quarter of the longest, half of it is 114 tokens.
    assert {row["width"] for row in made["votes"]} == {1, 2, 4}
    assert sorted(marks) == [
        ("ams-tova", "o", "full", 4),
        ("full", "X", "bottom", 4),
        ("tova", "o", "full", 4),
    ]


def trained_record() -> dict:
    """Return a record of samples with an admission in two ratios and a selection."""
    found = answers(samples=4)
    for name in ("wgkv:open", "wgkv:shut", "quest:few"):
        for line in [line for line in found if line["policy"] == "full"]:
            dropped = {"wgkv:open": [[80, 9.5]], "wgkv:shut": [[80, 40]]}.get(name)
            place = {"policy": name, "budget": 96, "interval": 64}
            found.append(line | place | {"dropped": dropped})
    settings = SETTINGS | {
        "policy_config": {"wgkv_gates": "gates.safetensors"},
        "variants": {"open": {}, "shut": {}, "few": {"quest_budget": 130}},
    }
    return {"settings": settings, **summary.summarise(found, settings)}


def test_admissions_and_selections_are_lines_of_votes():
    """Variants of a method are one line: ratios that its marks tell apart."""
    figures = drawn(trained_record())
    for name in VOTES:
        marks = [
            (line.get_label(), line.get_marker())
            for line in figures[name].axes[1].get_lines()
            if not line.get_label().startswith("_")
        ]
        assert {method for method, _ in marks} >= {"full", "wgkv", "quest", "tova"}
        assert {shape for method, shape in marks if method == "full"} == {"X"}
        (legend,) = figures[name].legends
        said = [text.get_text() for text in legend.get_texts()]
        assert {"wgkv", "quest", "tova"} <= set(said)
        assert "budget 96, few, open" in said and "budget 128, shut" in said
        check_readable(figures[name])


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


def test_an_empty_slot_of_the_grid_has_an_axis_above_it(large):
    figure = large["accuracy-by-budget"]
    assert len(figure.axes) == len(FAMILIES) + 1 == 11
    labels = [panel.get_xlabel() for panel in figure.axes]
    assert [bool(label) for label in labels] == [False] * 7 + [True] * 4


def test_small_files_keep_the_colours(large, tmp_path):
    panels.save(large["accuracy-by-budget"], tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**24)}
    for wanted in lines.COLOURS:
        rgb = [int(wanted[i : i + 2], 16) for i in (1, 3, 5)]
        distance = min(
            max(abs(a - b) for a, b in zip(rgb, colour, strict=True))
            for colour in colours
        )
        assert distance <= 8, wanted


def test_figures_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        drawn(record())
