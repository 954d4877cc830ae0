"""Tests of the report: tables of the docs, merging, from output files to pictures."""

import json
from pathlib import Path

import pytest
from report_data import SETTINGS, event, lines, record, write_run

from benchmarks import provenance
from benchmarks.accuracy import summary
from benchmarks.report import __main__ as command
from benchmarks.report import tables, traces

DOCS = provenance.ROOT / "docs"
VARIANTS = {"variants": {"x": {"ema_mix": 1.0}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two result files of different settings."""
    (tmp_path / "one.json").write_text(json.dumps(record()))
    other = [line | {"correct": True} for line in lines() if line["budget"] == 128]
    second = {"settings": {}, **summary.summarise(other, SETTINGS)}
    (tmp_path / "two.json").write_text(json.dumps(second))
    return tmp_path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of two events."""
    events = [event(40, 0, [[[0, 1]]]), event(80, 1, [[[0, 50]]])]
    write_run(tmp_path / "trace", events)
    return tmp_path / "trace"


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


def test_a_variant_is_tested_against_the_policy_without_it(tmp_path):
    renamed = {"ams-tova": "ams-tova:x", "tova": "ams-tova"}
    made = [line | {"policy": renamed.get(line["policy"], "full")} for line in lines()]
    found = {"settings": SETTINGS, **summary.summarise(made, SETTINGS | VARIANTS)}
    (tmp_path / "one.json").write_text(json.dumps(found))
    for against, test in (("base", "2, 0, 0.5"), ("full", "0, 2, 0.5")):
        description = f'files: [one.json]\nrows: ["ams-tova:x"]\nagainst: {against}\n'
        filled = tables.fill(document(f"{description}budget: 96\n"), tmp_path)
        assert f"| {test} |" in filled


def test_check_writes_nothing(folder, capsys):
    path = folder / "doc.md"
    path.write_text(document("files: [one.json]\nrows: [full]\n"))
    before = path.read_text()
    words = ["docs", str(path), "--results", str(folder)]
    assert command.main([*words, "--check"]) == 1 and path.read_text() == before
    assert "is out of date" in capsys.readouterr().out
    assert command.main(words) == 0 and "100 [51, 100]" in path.read_text()
    assert command.main([*words, "--check"]) == 0


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
        "run-accuracy-by-policy",
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
