"""Tests of the report: tables of the docs, p values, the way from files to pictures."""

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import packed, provenance
from benchmarks.accuracy import summary
from benchmarks.accuracy.questions import digest_of
from benchmarks.language import record as language
from benchmarks.report import __main__ as command
from benchmarks.report import tables, tradeoff_figure
from reasoner.problems import generate
from support.report_data import SETTINGS, event, lines, record, write_run

DOCS = provenance.ROOT / "docs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.json").write_text(json.dumps(record()))
    other = [line | {"correct": True} for line in lines() if line["budget"] == 128]
    second = {"settings": {}, **summary.summarise(other, SETTINGS)}
    (tmp_path / "two.json").write_text(json.dumps(second))
    return tmp_path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events = [event(40, 0, [[[0, 1]]]), event(80, 1, [[[0, 50]]])]
    write_run(tmp_path / "trace", events)
    return tmp_path / "trace"


def document(description: str, table: str = "") -> str:
    start = f"before\n<!-- table families\n{description}-->\n"
    return f"{start}{table}<!-- /table -->\nafter\n"


def rendered(kind: str, description: str, folder: Path) -> list[str]:
    return tables.render(kind, description, folder).splitlines()


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


def test_intervals_stand_in_generated_tables_only():
    root = provenance.ROOT
    for page in [*PAGES, *DOCS.glob("*.md")]:
        written = tables.BLOCK.sub("", page.read_text())
        assert not INTERVAL.search(written), (page.relative_to(root), written)


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


ONE = "files: [one.json]\n"
REFUSED = (
    ("families", "rows: [tova]", r"table: expected \['files', 'rows'\] and any of"),
    ("families", ONE + "rows: [tova]", "expected budget and interval beside"),
    ("families", ONE + "rows: [keydiff]", r"expected \['a:1', .*of keydiff in"),
    ("families", "files: [none.json]\nrows: [tova]", "results: cannot read"),
    ("budgets", ONE + "rows: [full]\nbudget: [96, 100]", "expected budgets of"),
    ("budgets", ONE + "rows: [full]\nbudget: []", "expected budgets of"),
    ("budgets", ONE + "rows: [keydiff]", "expected keydiff in"),
    (
        "comparisons",
        ONE + "rows: [ams-tova]\nscore: prefix\nbudget: 96\nagainst: base",
        "a file with the score 'prefix' of ams-",
    ),
)


@pytest.mark.parametrize(("kind", "description", "message"), REFUSED)
def test_tables_that_cannot_be_made_are_refused(folder, kind, description, message):
    with pytest.raises(ValueError, match=message):
        tables.render(kind, description, folder)


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
    table = rendered("picked", description, tmp_path)
    assert table[0] == "|  | steps | value |"
    assert table[2:] == [f"| A | 1,201 | {cells[0]} |", f"| B | 12.5 | {cells[1]} |"]


def test_checks_on_a_gpu_are_those_of_each_groups_last_run(tmp_path):
    def line(group, check, ok, detail=""):
        return {"group": group, "check": check, "ok": ok, "detail": detail}

    lines = [
        {"machine": {}},
        line("syncs", "before", False),
        line("words", "DMS", True),
        {"machine": {}},
        line("triton", "identity", True),
        line("syncs", "stock", True),
        line("syncs", "events", False),
        line("flashinfer", "engines", True, "NOT RUN: it is not installed"),
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert rendered("gpu-checks", "file: some.jsonl", tmp_path)[2:] == [
        "| `flashinfer` | 0 | 0 | 1 | - |",
        "| `syncs` | 1 | 1 | 0 | events |",
        "| `triton` | 1 | 0 | 0 | - |",
        "| `words` | 1 | 0 | 0 | - |",
        "| all | 3 | 1 | 1 |  |",
    ]


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


# -- scores, p values and what servers measured ----------------------------------------


@pytest.fixture
def scored(tmp_path) -> Path:
    """A folder with a file of which parts of answers are known.

    Of 8 questions with 11 lines, `tova` has the first line in all, `ams-tova` at 96
    one line more in all, and at 128 the whole trace of the first two questions.
    """
    settings = {**SETTINGS, "policy_config": {}}
    made = []
    for number in range(8):
        problem = generate("copy", 10, number)
        parts = problem.trace.split(";")
        digest = digest_of(problem.prompt, [problem.answer])
        lengths = {
            ("tova", 96): 1,
            ("tova", 128): 1,
            ("ams-tova", 96): 2,
            ("ams-tova", 128): 11 if number < 2 else 1,
        }
        for (policy, budget), length in lengths.items():
            place = {"policy": policy, "budget": budget, "task": "copy:10"}
            place |= {"id": str(number), "digest": digest, "correct": length == 11}
            text = ";".join(parts[:length])
            made.append(lines()[-1] | place | {"answer": "5", "text": text})
    found = {"settings": settings, **summary.summarise(made, settings)}
    (tmp_path / "parts.json").write_text(json.dumps(found))
    return tmp_path


def test_p_values_are_corrected_for_all_tests_of_the_table(scored):
    """Two budgets and two scores are four tests."""
    description = "files: [parts.json]\nrows: [ams-tova]\nagainst: base\n"
    head, _, low, high = rendered(
        "comparisons", f"{description}score: [lines, answer]\n", scored
    )
    assert head == (
        "| policy | against | budget | lines: difference [95 %], p | "
        "answer: right alone, wrong alone, p |"
    )
    # All of 8 questions differ, in one direction: 4 * 2 / 2 ** 8.
    assert low == "| `ams-tova` | `tova` | 96 | +9.1 [9.1, 9.1], 0.031 | 0, 0, 1 |"
    # Two of 8 do: 3 * 2 / 2 ** 2, at most 1.
    start = r"\| `ams-tova` \| `tova` \| 128 \| \+22\.7 \[0\.0, "
    assert re.fullmatch(start + r"[\d.]+\], 1 \| 2, 0, 1 \|", high)
    _, _, alone = rendered("comparisons", f"{description}budget: 96\n", scored)
    assert alone == "| `ams-tova` | `tova` | 96 | 0, 0, 1 |"


def compared(folder: Path, names: dict[str, str], against: str) -> list[str]:
    """Return the tests of a policy at 96, made of answers of others."""
    made = [line | {"policy": names[line["policy"]]} for line in lines()]
    settings = {**SETTINGS, "variants": {"x": {"ema_mix": 1.0}}}
    found = {"settings": settings, **summary.summarise(made, settings)}
    (folder / "one.json").write_text(json.dumps(found))
    description = f'files: [one.json]\nrows: ["{names["ams-tova"]}"]\nbudget: 96\n'
    table = rendered("comparisons", f"{description}against: {against}\n", folder)
    return [row.partition("` | ")[2] for row in table[2:]]


@pytest.mark.parametrize(
    ("against", "tests"),
    [
        ("base", ["`tova` | 96 | 2, 0, 0.5 |"]),
        ("full", ["`full` | 96 | 0, 2, 0.5 |"]),
        ("[full, base]", ["`full` | 96 | 0, 2, 1 |", "`tova` | 96 | 2, 0, 1 |"]),
    ],
)
def test_a_policy_is_tested_against_full_and_its_scorer(tmp_path, against, tests):
    names = {name: name for name in ("full", "tova", "ams-tova")}
    assert compared(tmp_path, names, against) == tests


def test_the_base_is_the_first_on_file_and_no_test_is_refused(tmp_path):
    names = {"full": "random", "tova": "dms", "ams-tova": "dms+quest"}
    for against in ("base", "dms", "[quest, dms]"):
        assert compared(tmp_path, names, against) == ["`dms` | 96 | 2, 0, 0.5 |"]
    with pytest.raises(ValueError, match=r"expected tests of dms\+quest against quest"):
        compared(tmp_path, names, "quest")


def test_columns_are_scores_and_what_the_server_measured(scored):
    made = json.loads((scored / "parts.json").read_text())
    ratio = {"ratio": 0.5, "low": 0.25, "high": 0.755}
    measured = {"held_tokens": 98.6, "peak_tokens": 120.0}
    measured["to_full"] = {"held_tokens": ratio, "tok_s": ratio}
    for row in made["summary"]:
        row["measured"] = measured if row["budget"] == 96 else None
    (scored / "parts.json").write_text(json.dumps(made))
    wanted = "file: parts.json\nrows: {ours: ams-tova}\nbudget: %d\ncolumns: {%s}\n"
    names = '"lines, %": lines, held: held_tokens, most: peak_tokens, x: held_share'
    head, _, row = rendered("columns", wanted % (96, names), scored)
    assert head == "| policy | lines, % | held | most | x |"
    assert row == "| ours | 18 [18, 18] | 99 | 120 | 0.50 |"
    (row,) = rendered("columns", wanted % (96, "a: held_shares, b: speeds"), scored)[2:]
    assert row == "| ours | 0.50 [0.25, 0.76] | 0.50 [0.25, 0.76] |"
    for place, message in (
        ((96, "a: line"), r"expected columns of .*, got \['line'\]"),
        ((64, "a: lines"), "expected ams-tova in parts.json, got none"),
        ((128, "a: speeds"), "expected 'to_full' of ams-tova, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            rendered("columns", wanted % place, scored)


def test_bytes_of_caches_of_two_dtypes_stand_side_by_side(tmp_path):
    held = {"full": 400.0, "tova": 200.0, "ams-tova": 100.0}
    for name, cache in (("own", {}), ("fp8", {"kv_cache_dtype": "fp8_e4m3"})):
        made = record()
        made["settings"] = made["settings"] | {"dtype": "bfloat16"} | cache
        for row in made["summary"]:
            row["measured"] = {"held_tokens": held[row["policy"]]}
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    wanted = (
        "files: [%s]\nbudget: 96\nrows: {a: full, b: tova, c: full@fp8_e4m3, "
        "d: ams-tova@fp8_e4m3}\ncolumns: {bytes: held_bytes}\n"
    )
    rows = rendered("columns", wanted % "own.json, fp8.json", tmp_path)[2:]
    assert [row.split(" | ")[1] for row in rows] == [
        f"{share} |" for share in ("1.00", "0.50", "0.50", "0.12")
    ]
    for files, message in (
        ("own.json", "expected full@fp8_e4m3 in .*, got none"),
        ("own.json, own.json", "expected files of different caches"),
    ):
        with pytest.raises(ValueError, match=message):
            rendered("columns", wanted % files, tmp_path)


# -- what is lost over what is held -------------------------------------------------


def of_language(folder: Path, part: str, kind: str, figure: str, **held: float) -> None:
    """Write a record of two texts, of a policy and of full KV."""
    values = {"full": [1.0, 3.0], "wgkv:a": [1.5, 3.5], "wgkv:b": [1.0, 3.2]}
    rows = [
        {"part": part, "policy": policy, "budget": 64, "interval": 32, figure: some}
        | ({"held": held[policy[-1]]} if policy[-1] in held else {})
        for policy, some in values.items()
    ]
    items = {part: {"x-1": kind, "x-2": kind}}
    made = {"settings": {}, "items": items, "rows": rows}
    (folder / f"{part}.json").write_text(json.dumps(made))


def test_a_trade_off_has_what_was_held_beside_what_was_lost(tmp_path):
    of_language(tmp_path, "losses", "novel", "loss", l=1.0, a=0.25, b=0.5)
    of_language(tmp_path, "tasks", "keys-2048", "right", a=0.3)
    column = "{{files: [{0}.json], part: {0}, place: [64, 32]}}"
    description = "rows: {all: full, one: 'wgkv:a', none: duo}\ncolumns:\n"
    for part in ("losses", "tasks"):
        description += f"  {part}: {column.format(part)}\n"
    head, _, *lines = rendered("tradeoff", description, tmp_path)
    assert head == "| policy | losses | held | tasks | held |"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0][:3] == ["all", "2.000 nats", "1.00"]
    assert cells[1][:3] == ["one", "+0.500 [0.500, 0.500]", "0.25"]
    assert cells[1][3].startswith("250 % [") and cells[1][4] == "0.30"
    assert cells[0][4] == ""  # nobody said what full KV held there
    assert cells[2] == ["none", "", "", "", ""]


def test_a_trade_off_is_drawn_over_what_was_held(tmp_path):
    of_language(tmp_path, "losses", "novel", "loss", l=1.0, a=0.25, b=0.5)
    of_language(tmp_path, "tasks", "keys-2048", "right", a=0.3)
    paths = [tmp_path / "losses.json", tmp_path / "tasks.json"]
    texts, facts = tradeoff_figure.draw_tradeoff(paths, "").axes
    assert facts.get_title(loc="left") == "facts of 2048 tokens"
    for panel, x, y in ((texts, [0.25, 0.5], [0.5, 0.1]), (facts, [0.3], [250])):
        (line,) = [bar[0] for bar in panel.containers]
        assert list(line.get_xdata()) == x
        assert list(line.get_ydata()) == pytest.approx(y)
    assert command.draw(paths, tmp_path / "figures") == ["tradeoff"]
