"""Tests of the language benchmark: texts, engines, losses, records and tables.

Nothing is downloaded and no engine starts; `test_language_engine.py` starts one.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.accuracy.servers import options_of, split
from benchmarks.language import __main__ as language
from benchmarks.language import losses, record, runs, texts, training_text
from benchmarks.language.engines import Engine, Predicted
from benchmarks.language.texts import Text
from benchmarks.report import tables
from vllm_kvpolicy.events import EventPlan
from vllm_kvpolicy.policies.names import parse, resolve

GRIDS = Path(language.__file__).parent.parent / "grids" / "language"


def words_of(book: str) -> list[int]:
    """Encode a text, a token per character."""
    return list(map(ord, book))


@pytest.fixture
def cache(tmp_path):
    """Return a cache with made members, so that no package is fetched."""
    members = {
        texts.BOOKS: [
            f"{texts.BOOK_FOLDER}/{name}" for name in texts.BOOK_NAMES.values()
        ],
        texts.MATHEMATICS: [
            *(f"doc/src/{name}" for name in texts.GUIDES),
            *(f"sympy/{name}" for name in texts.SOURCES),
        ],
    }
    for package, names in members.items():
        for name in names:
            path = tmp_path / package.requirement.replace("==", "-") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (f"{name} line {number}" for number in range(200))
            path.write_bytes("\r\n".join(lines).encode())
    return tmp_path


def test_texts_are_cut_to_length_and_differ(cache):
    found = texts.read_texts(words_of, 7, 50, cache)
    assert len(found) == 36 and len({text.id for text in found}) == 36
    assert all(text.token_ids[0] == 7 and len(text.token_ids) == 50 for text in found)
    assert len({text.digest for text in found}) == 36
    second = next(text for text in found if text.id == "verse-2")
    words = "".join(map(chr, second.token_ids[1:]))
    place = f"{texts.BOOK_FOLDER}/{texts.BOOK_NAMES['verse']} line"
    assert words.startswith(place) and "\r" not in words


@pytest.mark.parametrize("budget, interval", [(512, 256), (256, 64), (500, 256)])
def test_losses_are_scored_from_the_first_event_of_a_prompt(budget, interval):
    first = EventPlan(4096, budget, interval, interval).next_event(0)
    assert losses.first_event(budget, interval) == first


def test_the_loss_of_a_text_is_of_what_follows_its_first_event():
    """Token i + 1 costs i, and the places are those of predicting positions."""
    scored = losses.Scored(np.arange(40.0), 0.5)
    found = losses.figures(scored, budget=8, interval=16)
    assert found["loss"] == np.arange(16, 40).mean()
    # Positions 16, 17, 32 and 33 lie in the first eighth of an interval.
    assert found["places"][0] == (16 + 17 + 32 + 33) / 4
    assert found["places"][-1] == (30 + 31) / 2
    assert found["held"] == 0.5


def test_what_is_held_follows_from_what_events_drop():
    """Position 8 is behind the second event, of which 9 - 4.5 tokens are left."""
    entries = [{0: 0.0}] * 9
    found = Predicted(entries, ((4, 2.0), (8, 4.5))).held_share(6)
    held = (7 - 2) + (8 - 2) + (9 - 4.5)
    assert found == pytest.approx(held / (7 + 8 + 9))
    assert Predicted(entries).held_share(6) == 1


class FakeAsker:
    """Gives token t the loss t / 10, under random a tenth more."""

    interval = 16

    def __init__(self):
        self.asked = []

    def ask(self, prompts, policy, budget, **sampling):
        self.asked.append((policy, budget, len(prompts)))
        assert sampling["prompt_logprobs"] == 0
        extra = 0.1 if policy == "random" else 0.0
        return [
            SimpleNamespace(
                prompt_logprobs=[None]
                + [{t: SimpleNamespace(logprob=-t / 10 - extra)} for t in prompt[1:]],
                kv_transfer_params=None,
            )
            for prompt in prompts
        ]


def made_texts(count: int) -> list[Text]:
    return [
        Text(f"novel-{n}", "novel", tuple((i * (n + 3)) % 11 for i in range(40)))
        for n in range(count)
    ]


def lines_of(policy: str, budget: int, count: int = 3) -> list[dict]:
    engine = Engine((policy,), 16)
    texts = made_texts(count)
    return runs.measure(FakeAsker(), "losses", engine, policy, budget, texts)


def test_each_token_is_looked_up_by_its_own_id():
    (text,) = made_texts(1)
    (found,) = losses.measure(FakeAsker(), "tova", 8, [text])
    assert found.losses == pytest.approx(np.array(text.token_ids[1:]) / 10)


def test_no_text_that_is_measured_is_trained_on():
    wanted = training_text.SOURCES[texts.MATHEMATICS]
    pages = [f"sympy-1.14.0/doc/src/{name}" for name in (*texts.GUIDES, "other.rst")]
    assert [training_text.is_trained_on(page, wanted) for page in pages] == [
        *[False] * len(texts.GUIDES),
        True,
    ]
    assert not training_text.is_trained_on("sympy-1.14.0/sympy/core.py", wanted)


def test_every_third_row_asks_for_what_it_says():
    book = "\n".join(f"Line {n} of a long book." for n in range(2000))
    made = list(training_text.rows([book] * 4, 6, seed=1))
    assert ["messages" in row for row in made] == [True, False, False] * 2
    assert made == list(training_text.rows([book] * 4, 6, seed=1))
    turns = made[0]["messages"]
    assert len(turns) == 2 * training_text.ASKED
    for turn in turns[1::2]:
        assert turn["role"] == "assistant" and turn["content"] in turns[0]["content"]
    assert all(row["text"] in book for row in made if "text" in row)


def write_run(path, settings=None) -> None:
    """Write an output file with full KV, tova and random at one place."""
    rows = [{"settings": settings or {"model": "made"}}]
    for policy in ("full", "tova", "random"):
        rows += lines_of(policy, 8)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tables_show_losses_above_full_and_pairs(tmp_path):
    write_run(tmp_path / "run.jsonl")
    made = record.of_files([tmp_path / "run.jsonl"])
    (tmp_path / "run.json").write_text(record.compact(made))
    assert json.loads((tmp_path / "run.json").read_text()) == made
    shown = tables.render("losses", "files: [run.json]", tmp_path)
    assert "| `full` |" in shown.splitlines()[2]
    assert shown.splitlines()[3] == "| `tova` | +0.000 [0.000, 0.000] |"
    assert shown.splitlines()[4] == "| `random` | +0.100 [0.100, 0.100] |"
    pairs = "files: [run.json]\npairs: [[tova, random], [random, full]]"
    shown = tables.render("losses", "files: [run.json]\nheld: true", tmp_path)
    assert [line.split("|")[-2].strip() for line in shown.splitlines()] == [
        *("held", "---", "1", "1.00", "1.00")
    ]
    first, second = tables.render("language-comparisons", pairs, tmp_path).splitlines()[
        2:
    ]
    assert "| `tova` | `random` | 8, 16 | -0.100 [-0.100, -0.100] | 3 of 3 |" in first
    assert "| 0 of 3 |" in second
    with pytest.raises(ValueError, match="expected keydiff at 8, 16, got none"):
        tables.render("losses", "files: [run.json]\nrows: [keydiff]", tmp_path)


def test_tables_of_several_files_are_of_the_texts_that_all_have(tmp_path):
    def write(name, policies, items, losses):
        rows = [
            {"part": "losses", "policy": policy, "budget": 8, "interval": 16}
            | {"loss": own}
            for policy, own in zip(policies, losses, strict=True)
        ]
        made = {"settings": {}, "rows": rows, "items": {"losses": dict.fromkeys(items)}}
        (tmp_path / name).write_text(json.dumps(made))

    write("many.json", ["full", "tova"], "abcd", [[1, 1, 1, 1], [9, 3, 9, 2]])
    write("few.json", ["random"], "db", [[4, 6]])
    write("other.json", ["random"], "xy", [[4, 6]])
    files = "files: [many.json, few.json]\n"
    pairs = files + "pairs: [[tova, random]]"
    (row,) = tables.render("language-comparisons", pairs, tmp_path).splitlines()[2:]
    assert "-2.500 [-3.000, -2.000] | 2 of 2" in row  # 3 - 6 and 2 - 4
    first, second = tables.render("losses", files, tmp_path).splitlines()[3:]
    assert "| `tova` | +1.500" in first and "| `random` | +4.000" in second
    with pytest.raises(ValueError, match="expected some losses that are in all files"):
        tables.render("losses", files.replace("few", "other"), tmp_path)


def test_a_run_asks_only_for_what_its_file_lacks(tmp_path, monkeypatch):
    fake = FakeAsker()
    settings = runs.Settings(Path(), "float32", 64, 2, (8,), (16,))
    monkeypatch.setattr(runs, "running", lambda *_: nullcontext(fake))
    out = tmp_path / "out.jsonl"
    work = runs.Work({"losses": made_texts(3)}, lines_of("tova", 8, count=2))
    runs.run(["tova", "random"], settings, work, out)
    # Two texts at once, then the third; of tova the third only.
    counts = [("full", 2), ("full", 1), ("tova", 1), ("random", 2), ("random", 1)]
    assert fake.asked == [(policy, 8, count) for policy, count in counts]
    assert len(out.read_text().splitlines()) == 7


def test_lines_of_other_texts_are_refused():
    lines = lines_of("tova", 8)
    lines[1]["digest"] = "another"
    work = runs.Work({"losses": made_texts(3)}, lines)
    with pytest.raises(ValueError, match="losses novel-1 is another question"):
        work.prepared("losses", FakeAsker())


@pytest.mark.parametrize("path", sorted(GRIDS.glob("*.yaml")), ids=lambda p: p.stem)
def test_grids_are_valid(path):
    """Each can be asked for, its windows fit, and every variant is used."""
    args = language.parse_args(["--grid", str(path)])
    used = {split(label)[1] for label in args.policies} - {""}
    assert used == set(args.variants)
    for label in args.policies:
        name, variant = split(label)
        options = options_of([name], variant, vars(args))
        assert args.variants.get(variant, {}).keys() <= options.keys()
        window = parse(name).window_tokens(resolve(parse(name), options).options)
        assert window <= min(args.intervals)
    assert "full" not in args.policies  # it always runs
