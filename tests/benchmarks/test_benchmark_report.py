"""Tests of the report: tables of the docs, figures of runs and of traces, merging."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import provenance
from benchmarks.accuracy import summary
from benchmarks.report import __main__ as command
from benchmarks.report import figures, tables, traces
from vllm_kvpolicy.trace_files import EventRecord, to_arrays

DOCS = provenance.ROOT / "docs"
SETTINGS = {
    "block_size": 32,
    "evict_prompts": True,
    "policy_config": {},
    "variants": {},
}
PLACES = {
    "full": [(None, None)],
    "tova": [(96, 64), (128, 64)],
    "ams-tova": [(96, 64), (128, 64)],
}


def lines(samples: int = 1) -> list[dict]:
    """Return the answers of three policies on two tasks, four questions each."""
    found = []
    for policy, places in PLACES.items():
        for (budget, interval), task in [
            (p, t) for p in places for t in ("a:1", "b:2")
        ]:
            for number in range(4 * samples):
                question, sample = divmod(number, samples)
                right = policy == "full" or question < (2 if policy == "tova" else 3)
                found.append(
                    {
                        "policy": policy,
                        "budget": budget,
                        "interval": interval,
                        "task": task,
                        "id": str(question),
                        "sample": sample,
                        "digest": "00000000",
                        "correct": right,
                        "score": float(right),
                        "answer": "5" if right else "6",
                        "prompt_tokens": 50,
                        "output_tokens": 100 + (budget or 0),
                        "capped": False,
                        "repeated": {"4": 0.2, "8": 0.1, "20": 0.0},
                    }
                )
    return found


def record(samples: int = 1) -> dict:
    return {"settings": SETTINGS, **summary.summarise(lines(samples), SETTINGS)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two result files of different settings."""
    (tmp_path / "one.json").write_text(json.dumps(record()))
    other = [line | {"correct": True} for line in lines() if line["budget"] == 128]
    second = {"settings": {}, **summary.summarise(other, SETTINGS)}
    (tmp_path / "two.json").write_text(json.dumps(second))
    return tmp_path


def document(description: str, table: str = "") -> str:
    return f"before\n<!-- table\n{description}-->\n{table}<!-- /table -->\nafter\n"


def test_the_docs_are_up_to_date():
    text = (DOCS / "results.md").read_text()
    assert text.count("<!-- table") == 2 == len(tables.BLOCK.findall(text))
    assert command.docs([DOCS / "results.md"], command.RESULTS, is_check=True) == []
    for name in tables.figure_names(text):
        assert (DOCS / "figures" / name).is_file()


def test_a_table_is_written_and_stays(folder):
    description = (
        "files: [one.json, two.json]\nrows: [full, tova, ams-tova, tova*]\n"
        "budget: 128\nagainst: base\n"
    )
    filled = tables.fill(document(description, "| old |\n"), folder)
    head, *rows = filled.partition("-->\n")[2].splitlines()[:6]
    assert head == (
        "| policy | a:1 | b:2 | answers cut off "
        "| against base: right alone, wrong alone, p |"
    )
    assert rows == [
        "|---|---|---|---|---|",
        "| `full` | 100 [51, 100] | 100 [51, 100] | 0 % | - |",
        "| `tova` | 50 [15, 85] | 50 [15, 85] | 0 % | - |",
        "| `ams-tova` | 75 [30, 95] | 75 [30, 95] | 0 % | 2, 0, 0.5 |",
        "| `tova` * | 100 [51, 100] | 100 [51, 100] | 0 % | - |",
    ]
    assert filled.startswith("before\n") and filled.endswith("<!-- /table -->\nafter\n")
    assert "old" not in filled and tables.fill(filled, folder) == filled


def test_tests_against_full(folder):
    description = "files: [one.json]\nrows: [tova]\nbudget: 96\nagainst: full\n"
    assert "| 0, 4, 0.12 |" in tables.fill(document(description), folder)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("rows: [tova]\n", "table: expected files, rows and any of"),
        ("files: [one.json]\nrows: [tova]\nx: 1\n", "table: expected files, rows"),
        ("files: [one.json]\nrows: [tova]\n", "expected budget and interval beside"),
        ("files: [one.json]\nrows: [keydiff]\n", r"expected \['a:1', .*of keydiff in"),
        ("files: [one.json]\nrows: [tova*]\nbudget: 96\n", "expected a second file"),
        ("files: [none.json]\nrows: [tova]\n", "results: cannot read"),
        ("files: [\n", "table: cannot read"),
    ],
)
def test_tables_that_cannot_be_made_are_refused(folder, description, message):
    with pytest.raises(ValueError, match=message):
        tables.fill(document(description), folder)


def test_check_writes_nothing(folder, capsys):
    path = folder / "doc.md"
    path.write_text(document("files: [one.json]\nrows: [full]\n"))
    before = path.read_text()
    words = ["docs", str(path), "--results", str(folder)]
    assert command.main([*words, "--check"]) == 1 and path.read_text() == before
    assert "is out of date" in capsys.readouterr().out
    assert command.main(words) == 0 and "100 [51, 100]" in path.read_text()
    assert command.main([*words, "--check"]) == 0


def panel_lines(figure) -> list[dict]:
    """Return what each panel's legend knows: label -> x and y of a line."""
    return [
        {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in panel.get_lines()
            if not str(line.get_label()).startswith("_")
        }
        for panel in figure.axes
    ]


def test_figures_of_a_run_show_its_numbers():
    made = record()
    drawn = dict(figures.draw_accuracy(made))
    assert list(drawn) == [
        "accuracy-by-budget",
        "accuracy-by-kv_read",
        "accuracy-by-kv_peak",
        "repetition-by-budget",
    ]
    titles = [panel.get_title(loc="left") for panel in drawn["accuracy-by-budget"].axes]
    assert titles == ["all", "a:1", "b:2"]
    pooled = [row for row in made["summary"] if row["family"] == "all"]
    costs = panel_lines(drawn["accuracy-by-kv_read"])[0]
    ams = [row for row in pooled if row["policy"] == "ams-tova"]
    assert costs["ams-tova"] == ([row["kv_read"] for row in ams], [75.0, 75.0])
    assert costs["full"][1] == [100.0]
    panel = drawn["accuracy-by-budget"].axes[1]
    (bars,) = [c for c in panel.containers if c.get_label() == "tova"]
    assert list(bars[0].get_xdata()) == [96, 128]
    assert list(bars[0].get_ydata()) == [50.0, 50.0]
    (stems,) = bars[2]
    low, high = stems.get_segments()[0][:, 1]
    assert low == pytest.approx(15.0, abs=0.05) and high == pytest.approx(
        85.0, abs=0.05
    )
    (bars,) = [
        c
        for c in drawn["repetition-by-budget"].axes[0].containers
        if c.get_label() == "tova"
    ]
    assert list(bars[0].get_ydata()) == [10.0, 10.0]


def test_votes_are_marked_with_length_and_width():
    made = record(samples=4)
    figure = dict(figures.draw_accuracy(made))["accuracy-by-kv_peak"]
    texts = {text.get_text() for text in figure.axes[1].texts}
    # Four equal samples: wider votes are dearer and no better.
    assert {row["width"] for row in made["votes"]} == {1, 2, 4}
    assert texts == {"114x1 ", "228x1 96"}
    assert list(figure.axes[0].texts) == []


def test_only_votes_that_nothing_cheaper_equals_are_shown():
    points = [(5, 0.5), (1, 0.0), (2, 0.3), (2, 0.2), (3, 0.3), (9, 0.4), (9, 0.6)]
    votes = [{"kv_read": cost, "accuracy": share} for cost, share in points]
    shown = [(v["kv_read"], v["accuracy"]) for v in figures.front(votes, "kv_read")]
    assert shown == [(2, 0.3), (5, 0.5), (9, 0.6)]


def test_an_older_file_is_drawn_without_what_it_lacks():
    older = tables.read_record(command.RESULTS / "accuracy_catalogue.json")
    assert list(dict(figures.draw_accuracy(older))) == ["accuracy-by-budget"]


def event(position: int, ordinal: int, heads: list[list[list[int]]]) -> EventRecord:
    """Return an event that keeps the given positions, by layer and head."""
    kept = np.array(heads, np.int32)
    held = np.broadcast_to(
        np.arange(position, dtype=np.int32), (*kept.shape[:2], position)
    )
    return EventRecord(
        request_id="r",
        policy="tova",
        position=position,
        ordinal=ordinal,
        frontier=position,
        budget=kept.shape[-1],
        prompt=1,
        sinks=0,
        block_size=1,
        held=held,
        selected=kept,
        survivors=kept,
        moved=0.0,
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two events: layer 0 keeps the same tokens, layer 1 in one head none of them."""
    records = [
        event(40, 0, [[[0, 1], [0, 1]], [[0, 1], [0, 1]]]),
        event(80, 1, [[[0, 1], [0, 1]], [[0, 1], [50, 51]]]),
    ]
    folder = tmp_path / "trace"
    folder.mkdir()
    for number, one in enumerate(records):
        np.savez(folder / f"{number}.npz", **to_arrays(one))  # type: ignore[arg-type]
    return folder


def test_iou_is_taken_by_layer(trace):
    found = traces.read_policies(trace)
    assert found["tova"]["iou_by_layer"] == [1.0, 0.5]
    assert found["tova"]["iou"] == 0.75 and len(found["tova"]["retention"]) == 20


def test_events_that_do_not_follow_each_other_are_not_compared(trace):
    (trace / "1.npz").unlink()
    last = event(120, 2, [[[0, 1], [0, 1]], [[0, 1], [0, 1]]])
    np.savez(trace / "1.npz", **to_arrays(last))  # type: ignore[arg-type]
    assert "iou_by_layer" not in traces.read_policies(trace)["tova"]


def test_figures_of_traces_show_their_numbers(trace):
    policies = traces.read_policies(trace)
    drawn = dict(figures.draw_traces(policies))
    assert list(drawn) == ["retention", "wipe-outs", "iou-by-layer"]
    assert panel_lines(drawn["iou-by-layer"]) == [{"tova": ([0, 1], [1.0, 0.5])}]
    first, second = panel_lines(drawn["wipe-outs"])
    assert first["tova"][0] == second["tova"][0] == [16, 32, 64]
    shares = [100 * policies["tova"][f"wiped_{size}_0"] for size in (16, 32, 64)]
    assert first["tova"][1] == pytest.approx(shares)


def test_the_whole_way_from_output_files_to_pictures(tmp_path, trace, capsys):
    halves = lines()[::2], lines()[1::2]
    for number, half in enumerate(halves, 1):
        rows = [{"settings": SETTINGS}, *half]
        path = tmp_path / f"run.{number}-of-2.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = [str(tmp_path / f"run.{number}-of-2.jsonl") for number in (1, 2)]
    merged, traced = tmp_path / "run.json", tmp_path / "traces.json"
    assert command.main(["merge", *shards, "--out", str(merged)]) == 0
    assert json.loads(merged.read_text())["summary"] == record()["summary"]
    assert command.main(["trace", str(trace), "--out", str(traced)]) == 0
    output = tmp_path / "figures"
    words = ["draw", str(merged), str(traced), "--output", str(output)]
    assert command.main(words) == 0
    names = sorted(path.stem for path in output.glob("*.png"))
    assert names == [
        "iou-by-layer",
        "retention",
        "run-accuracy-by-budget",
        "run-accuracy-by-kv_peak",
        "run-accuracy-by-kv_read",
        "run-repetition-by-budget",
        "wipe-outs",
    ]
    assert all(path.stat().st_size > 5000 for path in output.glob("*.png"))


def test_policies_of_two_traces_do_not_mix(tmp_path, trace):
    path = tmp_path / "traces.json"
    path.write_text(json.dumps({"policies": traces.read_policies(trace)}))
    with pytest.raises(ValueError, match=r"\['tova'\] of another trace, too"):
        command.draw([path, path], tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_figures_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        dict(figures.draw_accuracy(record()))
