"""Sentences of the docs about quality and speed follow from rows of result files."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import packed, provenance
from benchmarks.report import __main__ as command
from benchmarks.report import claims, pages, tables
from support.report_data import record

ROOT = provenance.ROOT
GENERATED = {"support.md"}
"""Pages that `make docs` writes from the catalogue; they hold no results."""
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(ROOT.glob("docs/*.md")) if page.name not in GENERATED),
]
PAIRS = """
<!-- table comparisons
files: [wgkv.json.xz]
rows: ["wgkv+snapkv:lambda-0.16", "wgkv+expected:lambda-0.16"]
against: [snapkv, expected]
score: [lines, answer]
-->
<!-- /table -->
"""
TEXT = "`tova` has 50 [22, 78] % right at 96, `ams-tova` 75, `full` 100 %.\n"
CLAIM = """<!-- from one.json
tova@96 answer = 50 [22, 78] %; ams-tova@96 answer = 75 %
full in a:1
  accuracy = 100 %
-->
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a result file in which half or three quarters are right."""
    (tmp_path / "one.json").write_text(json.dumps(record()))
    return tmp_path


def mistakes(statements: str, folder: Path, text: str = "Of 3 lines:") -> str:
    """Return what is wrong with a page of one block and its claims."""
    page = f"{text}\n<!-- from one.json\n{statements}; given 3\n-->\n"
    return "\n".join(claims.mistakes_of(page, folder))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_follow_from_rows(page):
    assert claims.mistakes_of(page.read_text(), command.RESULTS) == []


def test_most_pages_with_results_claim_something():
    claiming = {page.name for page in PAGES if "<!-- from " in page.read_text()}
    assert claiming >= {"README.md", "results.md", "compositions.md", "wgkv.md"}


@pytest.mark.parametrize("name", ["README.md", "docs/compositions.md", "docs/dms.md"])
def test_no_figure_can_be_changed(name):
    """Any number of a block that needs a claim, made larger by one, is found."""
    text = (ROOT / name).read_text()
    lines = text.splitlines()
    changed = 0
    for scope in pages.scopes_of(text):
        for block in scope.blocks:
            at = block.line - 1
            found = pages.FIGURE.search(lines[at])
            if not block.needs_claim or not found or "`" in lines[at][: found.end()]:
                continue
            number = f"{int(found[1].replace(',', '').partition('.')[0]) + 1}7"
            line = lines[at][: found.start()] + number + lines[at][found.end() :]
            page = "\n".join([*lines[:at], line, *lines[at + 1 :]])
            assert claims.mistakes_of(page, command.RESULTS), line
            changed += 1
    assert changed >= 1


def test_a_changed_record_is_found(tmp_path):
    """README's figure of the best policy at 192 tokens is that of one row."""
    text = (ROOT / "README.md").read_text()
    for path in command.RESULTS.glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert claims.mistakes_of(text, tmp_path) == []
    standard = tmp_path / "standard.json.xz"
    made = json.loads(packed.read_text(standard))
    place = {"policy": "expected", "budget": 192, "family": "all"}
    (row,) = [row for row in made["summary"] if row.items() >= place.items()]
    row["correct"] += 1
    packed.write_text(standard, json.dumps(made))
    found = claims.mistakes_of(text, tmp_path)
    assert "*@192 correct highest = 57: claims 57, the file has 58" in found[0]


def test_a_claim_holds_for_the_text_before_it(folder):
    assert claims.mistakes_of(TEXT + CLAIM, folder) == []
    for old in ("50", "22", "75", "100"):
        gone, new = claims.mistakes_of(TEXT.replace(old, "49") + CLAIM, folder)
        assert f"{old} is claimed more often" in gone and "49 has no claim" in new
    assert claims.mistakes_of("# Title\n" + CLAIM, folder)


@pytest.mark.parametrize(
    "text",
    [
        "`tova` has 12 % right.",
        "* of the digits 9 are right",
        "A gain of 3 points.",
        "It took 1.5 x as long.",
        "p = 0.03 for both.",
        "Held: 7 [5, 9] tokens.",
        "A log-loss of 2.25.",
        "| policy | right, % |\n|---|---|\n| `tova` | 12 |",
        "<!-- no figure: of the block above -->\nRight are 3.",
    ],
)
def test_quality_in_numbers_needs_a_claim(text, folder):
    assert re.search(
        r"line \d: [\d.]+ has no claim", claims.mistakes_of(text, folder)[0]
    )


@pytest.mark.parametrize(
    "text",
    [
        "Blocks of 32 tokens, `100 %`, [a page](https://host/3%).",
        "Right answers; 95 % bootstrap intervals.",
        "Run:\n\n    echo 50 %\n    <!-- from one.json\n\n```\n50 %\n```\n",
        "<!-- table budgets\nfiles: []\n-->\n| 50 % |\n<!-- /table -->",
        "<!--\n50 %\n-->",
        "At least 3 points.\n<!-- no figure: a target -->",
        "It happens right after 3 tokens.",
    ],
)
def test_other_text_needs_none(text, folder):
    assert claims.mistakes_of(text, folder) == []


@pytest.mark.parametrize(
    "statements",
    [
        "tova@96/128 answer > 40 %; tova@96 answer < 51 %",
        "tova@96 problems over tova@96 in a:1 problems = 2\nfrom one.json",
        "t*@96 in *:* answer count = 2; | summary | policy=full family=all count = 1",
        "| summary | policy!=full family=all | accuracy lowest = 0.50",
        "| settings | block_size = 32",
        "tova@96 repeated | 4 = 0.20",
    ],
)
def test_addresses_that_are_found(statements, folder):
    values = re.findall(r"= ([\d.]+)", statements)
    assert mistakes(statements, folder, f"Of 3 lines {' and '.join(values)}:") == ""


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("tova@96 answer = 49 %", "claims 49, the file has 50"),
        ("tova@96 answer = 50 [21, 78] %", "claims 21, the file has 21.5"),
        ("tova@96 answer = 50, 50 %", r"claims 2 values, the file has \[50.0\]"),
        ("tova@96 answer > 50 %", "claims > 50, the file has 50"),
        ("tova answer = 50 %", "tova has several budgets"),
        ("tova@64 answer = 50 %", r"no row tova@64 in all"),
        ("tova@96 in c:3 answer = 50 %", "no row tova@96 in c:3"),
        ("tova@96 against random answer = 1", "no test of tova against random"),
        ("tova@96 colour = 1", "no step 'colour'"),
        ("tova@96 policy = 1", "names 'tova', which is no number"),
        ("| votes | 7 = 1", "no step '7'"),
        ("tova@96 = 1", "expected `POLICY"),
        ("tova@96 is right", "expected `ADDRESS = VALUES`"),
        ("tova@96 answer = 50 % shown", "only a row `against` another"),
        ("ams-tova@96 against tova only_policy = 2 shown", "compares only_policy"),
        ("shown answer = none", "no table of the page compares answer"),
        ("from none.json; tova answer = 1", "none.json: tova answer = 1: cannot read"),
        ("from one.json tova@96 answer = 3 %", "claims 3, the file has 50"),
        ("| settings | block_size = 32 [31, 33]", "names 32, which has no interval"),
        ("table tova | answer at 96 = 50", "no table of the page has tova | answer"),
        ("given 4", "4 is claimed more often than the text has it"),
    ],
)
def test_claims_that_do_not_hold(statement, message, folder):
    assert re.search(message, mistakes(statement, folder))


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("wgkv+snapkv:lambda-0.16@192 against snapkv lines = +41 points shown", None),
        (
            "wgkv+snapkv:lambda-0.16@192 against snapkv lines = 41 points not shown",
            "p is",
        ),
        ("shown answer = wgkv+snapkv:lambda-0.16@192; given 41", None),
        ("shown answer gains of *+expected* = none; given 41", None),
        ("shown lines losses = none; given 41", None),
        ("shown lines against snapkv = none; given 41", "shown are wgkv.snapkv:lambda"),
    ],
)
def test_what_is_shown_is_read_from_the_pages_table(statements, message):
    text = tables.fill(PAIRS, command.RESULTS)
    claim = f"\n41 points of lines.\n<!-- from wgkv.json.xz\n{statements}\n-->\n"
    for page in (claim + text, text + claim):
        found = "\n".join(claims.mistakes_of(page, command.RESULTS))
        assert re.search(message, found) if message else not found


def test_cells_of_the_pages_tables_can_be_claimed(folder):
    table = (
        "<!-- table budgets\nfiles: [one.json]\nrows: [tova]\n-->\n<!-- /table -->\n"
    )
    claim = "<!-- from one.json\ntable tova | answer at 96 = 50 [22, 78]\n-->\n"
    page = f"`tova` is right in 50 [22, 78] %.\n{claim}{table}"
    assert claims.mistakes_of(page, folder) == []
    found = claims.mistakes_of(page.replace("78", "79"), folder)
    assert len(found) == 1 and "claims 79, the file has 78" in found[0]


def test_the_command_says_what_is_wrong(folder, capsys):
    page = folder / "page.md"
    page.write_text(TEXT + CLAIM)
    run = ["docs", str(page), "--results", str(folder)]
    assert command.main(run) == 0
    page.write_text(TEXT.replace("75", "76") + CLAIM)
    assert command.main(run) == 1
    assert "page.md: line 1: 76 has no claim" in capsys.readouterr().out
