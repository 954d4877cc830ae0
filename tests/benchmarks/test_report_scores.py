"""Tests of tables with partial scores, and of p values corrected for their number."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.accuracy import summary
from benchmarks.accuracy.questions import digest_of
from benchmarks.report import tables
from reasoner.problems import generate
from support.report_data import SETTINGS, lines, record

ROWS = "files: [parts.json]\nrows: [tova, ams-tova]\n"


def rendered(kind: str, description: str, folder: Path) -> list[str]:
    """Return the lines of a table."""
    return tables.render(kind, description, folder).splitlines()


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


def test_a_table_shows_the_score_it_asks_for(scored):
    head, _, tova, ams = rendered(
        "families", f"{ROWS}score: lines\nbudget: 96\n", scored
    )
    assert head == "| policy: lines | copy:10 | answers cut off |"
    assert tova == "| `tova` | 9 [9, 9] | 0 % |"
    assert ams == "| `ams-tova` | 18 [18, 18] | 0 % |"
    head, _, tova, ams = rendered("budgets", f"{ROWS}score: [lines, answer]\n", scored)
    assert head == (
        "| policy | lines at 96 | lines at 128 | answer at 96 | answer at 128 |"
    )
    assert tova == "| `tova` | 9 [9, 9] | 9 [9, 9] | 0 [0, 32] | 0 [0, 32] |"


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


@pytest.mark.parametrize("against", ["base", "ams-tova"])
def test_a_variant_is_tested_against_the_policy_without_it(tmp_path, against):
    names = {"full": "full", "tova": "ams-tova", "ams-tova": "ams-tova:x"}
    assert compared(tmp_path, names, against) == ["`ams-tova` | 96 | 2, 0, 0.5 |"]


def test_ams_is_tested_against_equal_quotas_by_their_word(tmp_path):
    names = {"full": "full", "tova": "strat-tova", "ams-tova": "ams-tova"}
    assert compared(tmp_path, names, "strat") == ["`strat-tova` | 96 | 2, 0, 0.5 |"]


def test_the_base_is_the_first_on_file_and_no_test_is_refused(tmp_path):
    names = {"full": "random", "tova": "dms", "ams-tova": "dms+quest"}
    for against in ("base", "dms", "[quest, dms]"):
        assert compared(tmp_path, names, against) == ["`dms` | 96 | 2, 0, 0.5 |"]
    with pytest.raises(ValueError, match=r"expected tests of dms\+quest against quest"):
        compared(tmp_path, names, "quest")


@pytest.mark.parametrize(
    ("kind", "score", "message"),
    [
        ("budgets", "digits", r"expected a score of \['answer', 'prefix', 'lines'\]"),
        ("budgets", "[]", "expected a score of"),
        ("families", "[lines, answer]", "at most 1, got"),
    ],
)
def test_unknown_scores_are_refused(scored, kind, score, message):
    with pytest.raises(ValueError, match=message):
        tables.render(kind, f"{ROWS}score: {score}\nbudget: 96\n", scored)


def test_a_file_without_the_score_is_refused(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(record()))
    description = "files: [one.json]\nrows: [ams-tova]\nscore: prefix\nbudget: 96\n"
    for kind, more in (("families", ""), ("comparisons", "against: base\n")):
        with pytest.raises(ValueError, match="a file with the score 'prefix' of ams-"):
            tables.render(kind, description + more, tmp_path)


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


def test_layouts_are_rows_with_tokens_per_head(tmp_path):
    layout = {"superblocks": 3, "loaded": 400, "rewritten": 200, "table_bytes": 2**20}
    layout |= {"kept": 100, "held": 800}
    row = {
        "layers": 2,
        "heads": 2,
        "page": 16,
        "tokens": 64,
        "layouts": {"max": layout},
    }
    (tmp_path / "tables.json").write_text(json.dumps({"results": [row]}))
    wanted = "file: tables.json\ntokens: 64\nrows: {padded: [max, %d]}\n"
    (found,) = rendered("layouts", wanted % 16, tmp_path)[2:]
    assert found == "| padded | 16 | 3 | 100 | 25.0 % | 12.5 % | 1.0 | 50 |"
    with pytest.raises(ValueError, match="expected one 'max' at .*'page': 32"):
        rendered("layouts", wanted % 32, tmp_path)
