"""Tests of the report: tables of the docs, merging, from output files to pictures."""

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import packed, provenance
from benchmarks.accuracy import summary
from benchmarks.language import record as language
from benchmarks.report import __main__ as command
from benchmarks.report import tables, traces
from support.report_data import SETTINGS, event, lines, record, write_run

DOCS = provenance.ROOT / "docs"


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


def document(description: str, table: str = "", kind: str = "families") -> str:
    start = f"before\n<!-- table {kind}\n{description}-->\n"
    return f"{start}{table}<!-- /table -->\nafter\n"


def table_of(description: str, kind: str, folder: Path) -> list[str]:
    """Return the lines of a table."""
    filled = tables.fill(document(description, kind=kind), folder)
    return filled.partition("-->\n")[2].partition("<!--")[0].splitlines()


PAGES = command.pages_with_tables()
INTERVAL = re.compile(r"\d \[[-+]?\d[\d.,]*, [-+]?\d[\d.,]*\]")
IMAGE = re.compile(r"!\[[^]]*\]\(([^)]+)\)")


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(provenance.ROOT))
)
def test_every_page_is_up_to_date(page):
    text = page.read_text()
    assert text.count("<!-- table") == len(tables.BLOCK.findall(text))
    assert command.pages([page], command.RESULTS, is_check=True) == [], "`make docs`"
    for target in IMAGE.findall(text):
        assert "://" in target or (page.parent / target).is_file()


def test_every_report_has_tables():
    reports = set((provenance.ROOT / "benchmarks" / "reports").glob("*.md"))
    assert reports and reports <= set(PAGES)


def test_intervals_stand_in_generated_tables_only():
    root = provenance.ROOT
    for page in [*PAGES, *DOCS.glob("*.md")]:
        written = tables.BLOCK.sub("", page.read_text())
        assert not INTERVAL.search(written), (page.relative_to(root), written)


def test_the_pages_of_results_are_short():
    for name in ("language.md", "results.md", "measured.md"):
        assert len((DOCS / name).read_text().splitlines()) <= 150, name


def merged_from(record: dict) -> list[Path]:
    """Return the answers that a record says it was made of, if it was."""
    words = shlex.split(record.get("provenance", {}).get("command", ""))
    answers = command.RESULTS / "answers"
    return [answers / Path(word).name for word in words if word.endswith(".jsonl.xz")]


@pytest.mark.slow
def test_every_summary_that_has_answers_is_theirs():
    answers = set((command.RESULTS / "answers").glob("*.jsonl.xz"))
    assert answers
    for path in command.RESULTS.glob("*.json*"):
        record = json.loads(packed.read_text(path))
        if files := merged_from(record):
            made = (
                language.of_files(files) if "items" in record else command.merge(files)
            )
            for part in made.keys() - {"provenance"}:
                assert made[part] == record[part], (path.name, part)
            answers -= set(files)
    assert not answers, "answers of no summary"


def test_a_table_is_written_and_stays(folder):
    description = (
        "files: [one.json, two.json]\nrows: [full, tova, ams-tova, tova*]\n"
        "budget: 128\n"
    )
    filled = tables.fill(document(description, "| old |\n"), folder)
    head, *rows = filled.partition("-->\n")[2].splitlines()[:6]
    assert head == "| policy: answer | a:1 | b:2 | answers cut off |"
    assert rows == [
        "|---|---|---|---|",
        "| `full` | 100 [51, 100] | 100 [51, 100] | 0 % |",
        "| `tova` | 50 [15, 85] | 50 [15, 85] | 0 % |",
        "| `ams-tova` | 75 [30, 95] | 75 [30, 95] | 0 % |",
        "| `tova` * | 100 [51, 100] | 100 [51, 100] | 0 % |",
    ]
    assert filled.startswith("before\n") and filled.endswith("<!-- /table -->\nafter\n")
    assert "old" not in filled and tables.fill(filled, folder) == filled


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("rows: [tova]\n", r"table: expected \['files', 'rows'\] and any of"),
        ("files: [one.json]\nrows: [tova]\nx: 1\n", r"table: expected \['files',"),
        ("[]\n", "table: expected a mapping"),
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


PICKED = {
    "servers": {"a@1": {"steps": 1201, "ms": 0.5}, "b@1": {"steps": 12.5}},
    "ratios": {"a@1 / b@1": {"speed": {"median": 1.3, "low": -1, "high": 4660.4}}},
    "rounds": [{"name": "a", "seed": 1, "kept": 0.25}, {"name": "a", "seed": 2}],
    "times": {"a": [{"s": 2.0}, {"s": 9.0}, {"s": 4.0}], "b": [{"s": 4.0}] * 3},
}


@pytest.mark.parametrize(
    ("path", "cells"),
    [
        ("servers | {}@1 | steps", ["1,201", "12.5"]),
        ("servers | {}@1 | ms", ["0.500", "-"]),
        ("ratios | {}@1 / b@1 | speed", ["1.30 [-1, 4,660]", "-"]),
        ("rounds | name={} seed=1 | kept %", ["25 %", "-"]),
        ("times | {} | 1 | s", ["9", "4"]),
        ("times | {} | * | s over times | b | * | s", ["1 [0.500, 2.25]", "1 [1, 1]"]),
    ],
)
def test_values_are_picked_by_their_paths(tmp_path, path, cells):
    (tmp_path / "one.json").write_text(json.dumps(PICKED))
    description = (
        "file: one.json\nrows: {A: a, B: [one.json, b]}\n"
        f"columns: {{steps: 'servers | {{}}@1 | steps', value: '{path}'}}\n"
    )
    table = table_of(description, "picked", tmp_path)
    assert table[0] == "|  | steps | value |"
    assert table[2:] == [f"| A | 1,201 | {cells[0]} |", f"| B | 12.5 | {cells[1]} |"]


@pytest.mark.parametrize(
    ("rows", "path", "message"),
    [
        ("{A: c}", "servers | {}@1 | steps", "expected values of 'c' in one.json"),
        ("{A: a, B: b}", "servers | {}@1 | x", "expected values of 'a' in one.json"),
    ],
)
def test_values_that_no_record_has_are_refused(tmp_path, rows, path, message):
    (tmp_path / "one.json").write_text(json.dumps(PICKED))
    text = f"file: one.json\nrows: {rows}\ncolumns: {{value: '{path}'}}\n"
    with pytest.raises(ValueError, match=message):
        table_of(text, "picked", tmp_path)
    both = "columns: {steps: 'servers | {}@1 | steps', none: 'servers | {}@1 | x'}\n"
    with pytest.raises(ValueError, match="expected values of 'none', got none"):
        table_of(f"file: one.json\nrows: {{A: a}}\n{both}", "picked", tmp_path)


def test_margins_are_rows_of_methods_and_columns_of_families(tmp_path):
    made = record(samples=4)
    (tmp_path / "one.json").write_text(json.dumps(made))
    description = "file: one.json\ncost: kv_peak\n"
    head, _, *rows = table_of(description, "margins", tmp_path)
    assert head == "| method | all | a:1 | b:2 | from | to |"
    assert [row.split("|")[1].strip() for row in rows] == ["`tova`", "`ams-tova`"]
    (row,) = [
        row
        for row in made["margins"]
        if (row["method"], row["family"]) == ("tova", "a:1")
        and (row["cost"], row["measure"]) == ("kv_peak", "accuracy")
    ]
    cell = f"{100 * row['margin']:+.1f} [{100 * row['low']:.1f}, "
    assert rows[0].split("|")[3].strip().startswith(cell)
    description += "rows: [ams-tova]\nmeasure: passed\n"
    (only,) = table_of(description, "margins", tmp_path)[2:]
    assert only.startswith("| `ams-tova` |")


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("file: one.json\ncost: x\n", r"table: expected cost of .*kv_peak.*, got 'x'"),
        ("file: one.json\ncost: kv_peak\nmeasure: x\n", "expected measure of"),
        ("file: one.json\ncost: kv_peak\nrows: [dms]\n", r"expected \['dms'\] in one"),
        ("file: one.json\n", r"table: expected \['cost', 'file'\]"),
    ],
)
def test_tables_of_margins_that_cannot_be_made_are_refused(
    tmp_path, description, message
):
    (tmp_path / "one.json").write_text(json.dumps(record(samples=4)))
    with pytest.raises(ValueError, match=message):
        table_of(description, "margins", tmp_path)


def test_budgets_are_columns_of_all_tasks_together(folder):
    description = "files: [one.json]\nrows: [full, tova]\n"
    head, _, full, tova = table_of(description, "budgets", folder)
    assert head == "| policy | answer at 96 | answer at 128 |"
    assert full == "| `full` | 100 [68, 100] | 100 [68, 100] |"
    assert tova == "| `tova` | 50 [22, 78] | 50 [22, 78] |"
    head, *_ = table_of(f"{description}budget: 128\n", "budgets", folder)
    assert head == "| policy | answer at 128 |"
    for budget in ("[96, 100]", "[]"):
        with pytest.raises(ValueError, match="expected budgets of"):
            table_of(f"{description}budget: {budget}\n", "budgets", folder)
    with pytest.raises(ValueError, match="expected keydiff in"):
        table_of("files: [one.json]\nrows: [keydiff]\n", "budgets", folder)


def test_an_unknown_kind_of_table_is_refused(folder):
    with pytest.raises(ValueError, match=r"table: expected one of \['budgets',"):
        table_of("files: []\n", "pie", folder)


def test_the_models_own_accuracy(tmp_path):
    score = {"family": "copy", "problems": 4, "low": 0.3, "high": 0.954}
    rows = [
        score | {"kind": "trained", "lines": 10, "trace_tokens": 60, "correct": 4},
        score | {"kind": "trained", "lines": 40, "trace_tokens": 240, "correct": 3},
        score | {"kind": "longer", "lines": 50, "trace_tokens": 300, "correct": 2},
    ]
    (tmp_path / "model.json").write_text(json.dumps({"scores": rows}))
    _, _, row = table_of("file: model.json\n", "model", tmp_path)
    assert row == (
        "| `copy` | 60, 240 | 10 lines: 100 [30, 95]; 40 lines: 75 [30, 95] | "
        "50 lines: 50 [30, 95] | - |"
    )
    with pytest.raises(ValueError, match="expected a file with 'scores'"):
        (tmp_path / "model.json").write_text("{}")
        table_of("file: model.json\n", "model", tmp_path)


@pytest.fixture
def peer(tmp_path):
    """The record of a peer and of our server, at a budget of 96."""

    def row(policy, accuracy, **more):
        share = {"accuracy": accuracy, "low": 0.2, "high": 0.8}
        limits = (None, None) if policy == "full" else (96, 64)
        place = dict(zip(("budget", "interval"), limits, strict=True))
        return {"policy": policy, **place, "family": "all", **share, **more}

    held = {"first": 1.0, "second": 0.5, "last": None}
    tests = {"full": (0, 0, 1.0), "tova": (3, 1, 0.625), "tova:sorted": (5, 0, 0.0625)}
    own = [row("full", 0.9), row("tova", 0.4), row("snapkv", 0.3), row("knorm", 0.2)]
    counts = "only_peer", "only_ours", "p"
    record = {
        "summary": [
            row("full", 0.9, sinks_held=dict.fromkeys(held), tok_s=200.0),
            row("tova", 0.5, sinks_held=held, tok_s=120.4),
            row("tova:sorted", 0.6, sinks_held=held | {"last": 0.75}, tok_s=1.0),
            row("tova", 0.1, sinks_held=held) | {"family": "copy:9"},
        ],
        "ours": {
            "summary": own,
            "speeds": [
                row(one["policy"], 0, concurrency=count, tok_s=100.0 * count)
                for one in own
                for count in (1, 16)
                if (one["policy"], count) != ("knorm", 16)
            ],
        },
        "against_ours": [
            row(name, 0, **dict(zip(counts, test, strict=True)))
            for name, test in tests.items()
        ],
        "refused": [row(name, 0) for name in ("snapkv", "snapkv:sorted")],
    }
    (tmp_path / "peer.json").write_text(json.dumps(record))
    return record


def test_the_peer_beside_us(peer, tmp_path):
    head, _, full, tova, snapkv, knorm = table_of("file: peer.json\n", "peer", tmp_path)
    test = "against ours: right alone, wrong alone, p"
    held = "first 4 tokens held after event 1, 2, last"
    assert head == (
        "| policy | kvpress as shipped | kvpress, cache kept in order | ours | "
        f"as shipped {test} | in order {test} | {held}, as shipped | {held}, in order |"
    )
    assert tova == (
        "| `tova` | 50 [20, 80] | 60 [20, 80] | 40 [20, 80] | 3, 1, 0.62 | "
        "5, 0, 0.062 | 100 %, 50 %, - | 100 %, 50 %, 75 % |"
    )
    assert snapkv == "| `snapkv` | refused | refused | 30 [20, 80] | - | - | - | - |"
    assert knorm == "| `knorm` | - | - | 20 [20, 80] | - | - | - | - |"
    head, _, full, tova, snapkv, knorm = table_of(
        "file: peer.json\n", "speeds", tmp_path
    )
    assert head == (
        "| policy | kvpress as shipped, one at a time | ours, 1 at once | "
        "ours, 16 at once |"
    )
    assert tova == "| `tova` | 120 | 100 | 1600 |"
    assert snapkv == "| `snapkv` | refused | 100 | 1600 |"
    assert knorm == "| `knorm` | - | 100 | - |"


@pytest.mark.parametrize("kind", ["peer", "speeds"])
def test_a_peer_at_several_budgets_is_asked_for_one(peer, tmp_path, kind):
    for rows in (
        *(peer[name] for name in ("summary", "against_ours", "refused")),
        *peer["ours"].values(),
    ):
        more = [row for row in rows if row["budget"]]
        rows += [row | {"budget": 128, "accuracy": 1.0, "tok_s": 7.0} for row in more]
    rows = [row for row in peer["refused"] if row["budget"] == 96]
    peer["refused"] = rows
    (tmp_path / "peer.json").write_text(json.dumps(peer))
    alone = table_of("file: peer.json\nbudget: 96\n", kind, tmp_path)
    assert any("refused" in line for line in alone)
    assert "120" in "".join(alone) or "50 [20, 80]" in "".join(alone)
    other = table_of("file: peer.json\nbudget: 128\n", kind, tmp_path)
    assert not any("refused" in line for line in other)
    assert "| 7 |" in "".join(other) or "100 [20, 80]" in "".join(other)
    with pytest.raises(ValueError, match="expected budget and interval beside"):
        table_of("file: peer.json\n", kind, tmp_path)
    with pytest.raises(ValueError, match="expected tova at"):
        table_of("file: peer.json\nbudget: 64\n", kind, tmp_path)


def test_check_writes_nothing(folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "ROOT", folder)
    monkeypatch.setattr(command, "RESULTS", folder)
    path = folder / "doc.md"
    path.write_text(document("files: [one.json]\nrows: [full]\n"))
    before = path.read_text()
    assert command.main(["pages", "--check"]) == 1 and path.read_text() == before
    assert "is out of date" in capsys.readouterr().out
    assert command.main(["pages"]) == 0 and "100 [51, 100]" in path.read_text()
    assert command.main(["pages", "--check"]) == 0


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
