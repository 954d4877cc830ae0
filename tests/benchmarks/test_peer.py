"""Tests of the comparison with kvpress, without it: a fake worker stands for it."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.accuracy import results, servers
from benchmarks.accuracy.questions import questions_of
from benchmarks.peer import __main__ as command
from benchmarks.peer import asking, joining, process, record
from benchmarks.peer.process import PeerError
from benchmarks.report import records, tables
from reasoner.tokenizer import chat_prompt, encode
from support.servers.chat_server import ChatServer, serve

TASKS = ["copy:5", "sub:4"]
FAKE = r"""
import json, sys
from pathlib import Path
from reasoner.tokenizer import encode

folder = Path(sys.argv[1])
settings = json.loads(input())
print(json.dumps({"kvpress": "fake"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    with (folder / "asked").open("a") as file:
        file.write(line)
    if (folder / "die").exists() and asked["row"] == "tova:sorted":
        sys.exit("out of luck")
    said = {
        "tokens": [*encode(r"\boxed{7}"), 1], "stopped": True, "seconds": 0.5,
        "kv_read": 70, "kv_peak": 30, "events": 2, "sinks_held": [1.0, 0.25],
        "kept_mean": 20.0, "revived": None,
    }
    if asked["row"] == "chunk-snapkv" and not (folder / "agree").exists():
        said = {"refused": "AssertionError: no"}
    print(json.dumps(said), flush=True)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder in which a fake worker writes what it was asked."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    words = [sys.executable, str(script), str(tmp_path)]
    monkeypatch.setattr(process, "command", lambda python: words)
    monkeypatch.setenv("PYTHONPATH", str(command.provenance.ROOT))
    return tmp_path


def ask(folder, *words, policies=("full", "tova")):
    given = ["ask", "--folder", str(folder), "--tasks", *TASKS, "--budgets", "96"]
    return command.main([*given, "--policies", *policies, *words])


def lines_of(path):
    return record.read(path)[1]


def asked_of(folder):
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


def test_the_peer_sees_our_prompts_and_is_judged_by_our_rules(fake, capsys):
    assert ask(fake, "--n", "2") == 0
    assert "12 answers to come, about 0 minutes" in capsys.readouterr().err
    asked, lines = asked_of(fake), lines_of(fake / "peer.jsonl")
    rows = ["full", "tova", "tova:sorted"]
    assert [one["row"] for one in asked] == [row for row in rows for _ in range(4)]
    questions = [q for task in TASKS for q in questions_of(task, 2, 0, Path())]
    for one, line, question in zip(asked, lines, questions * 3, strict=True):
        assert one["prompt"] == encode(chat_prompt(question.prompt))
        assert one["start"] == len(encode("<bos><user>"))
        assert one["max_tokens"] == question.max_tokens
        place = (None, None) if one["row"] == "full" else (96, 64)
        assert (one["budget"], one["interval"]) == place
        assert line["digest"] == question.digest
        assert line["text"] == r"\boxed{7}" and line["answer"] == "7"
        assert line["correct"] == (question.answers == ("7",))
        assert line["prompt_tokens"] == len(one["prompt"])


def test_an_answer_that_is_cut_off_is_wrong():
    (question,) = questions_of("copy:5", 1, 0, Path())
    right = rf"\boxed{{{question.answers[0]}}}"
    prompts = SimpleNamespace(ids=lambda prompt: [1], text=lambda tokens: right)
    reply = dict.fromkeys(("kv_read", "kv_peak", "events", "kept_mean", "revived"))
    reply |= {"tokens": [1, 2], "seconds": 1.0, "sinks_held": []}
    for stopped in (True, False):
        reply["stopped"] = stopped
        line = asking.line_of({}, question, reply, prompts, None)
        assert (line["correct"], line["capped"]) == (stopped, not stopped)


def test_a_worker_that_dies_loses_nothing_that_is_written(fake):
    (fake / "die").touch()
    with pytest.raises(PeerError, match="worker: ended with status 1"):
        ask(fake, "--n", "2")
    assert len(lines_of(fake / "peer.jsonl")) == 8
    (fake / "die").unlink()
    for _ in range(2):  # the second finds nothing to ask
        ask(fake, "--n", "2")
    assert len({results.key_of(one) for one in lines_of(fake / "peer.jsonl")}) == 12
    assert len(asked_of(fake)) == 9 + 4


def test_the_record_makes_tables_and_says_what_was_refused(fake, monkeypatch):
    made = fake / "made.json"
    monkeypatch.setattr(sys, "argv", ["x", "ask", "--folder", "/a/machine/runs"])
    ask(fake, "--n", "2", "--record", str(made), policies=["full", "chunk-snapkv"])
    ask(fake, "--n", "2", "--record", str(made), policies=["streaming", "chunk-snapkv"])
    whole = records.read(made)
    place = {"policy": "chunk-snapkv", "budget": 96, "interval": 64}
    assert whole["refused"] == [place | {"answers": 0, "message": "AssertionError: no"}]
    assert "/" not in whole["provenance"]["command"]
    rows = "files: [made.json]\nrows: [full, streaming, 'streaming:sorted']\n"
    table = tables.render("families", rows, fake)
    shown = [line.split("`")[1] for line in table.splitlines()[2:]]
    assert shown == ["full", "streaming", "streaming:sorted"]
    (row,) = [
        row
        for row in whole["summary"]
        if (row["policy"], row["family"]) == ("streaming:sorted", "all")
    ]
    assert (row["kv_read"], row["kv_peak"], row["kept_mean"]) == (70, 30, 20)
    assert row["sinks_held"] == {"first": 1.0, "second": 0.25, "last": 0.25}
    bases = [pair["against"] for pair in whole["pairs"]]
    assert bases == ["full", "full", "streaming"]
    rows = "files: [made.json]\nrows: ['streaming:sorted']\nagainst: base\n"
    test = tables.render("comparisons", rows, fake).splitlines()[2]
    assert test.startswith("| `streaming:sorted` | `streaming` | 96 | ")
    tokens = len(encode(r"\boxed{7}")) + 1
    assert row["tok_s"] == tokens / 0.5 and row["revived"] is None


def test_options_that_both_sides_have_are_ours():
    _, args = command.parse_args(["ask"])
    options = asking.options_of(args)
    assert options["snapkv"] == {"window_size": 32, "kernel_size": 5}
    assert options["lagkv"]["lag_size"] == args.policy_config["lag"] == 32
    assert options["expected"]["epsilon"] == 0.01 and options["tova"] == {}
    _, args = command.parse_args(["ask", "--policy-config", '{"pyramid_beta": 0}'])
    with pytest.raises(ValueError, match="pyramid_beta"):
        asking.options_of(args)


@pytest.fixture
def server(monkeypatch):
    """A server that stands for every one that a run starts."""
    fake = ChatServer()
    with serve(fake) as url:

        @contextmanager
        def running(arguments, log_folder):
            ((name, _),) = arguments.items()
            yield {name: SimpleNamespace(url=url)}

        monkeypatch.setattr(servers, "running", running)
        yield fake


def test_our_server_is_asked_the_same_in_rounds(fake, server):
    ask(fake, "--n", "2")
    words = ["ours", "--folder", str(fake), "--tasks", *TASKS, "--budgets", "96"]
    words += ["--policies", "full", "tova", "--n", "2", "--concurrencies", "1", "3"]
    assert command.main([*words, "--dry-run"]) == 0 and not server.bodies
    assert command.main(words) == 0
    # A round of 4 per policy and concurrency, and one request to warm each server up.
    assert len(server.bodies) == 2 * 2 * 4 + 2
    assert server.most_at_once == 3
    alone, together = (lines_of(fake / f"ours-{c}.jsonl") for c in (1, 3))
    assert set(map(results.key_of, alone)) == set(map(results.key_of, together))
    theirs = {results.key_of(line) for line in lines_of(fake / "peer.jsonl")}
    assert set(map(results.key_of, alone)) <= theirs
    whole = records.read(fake / "record.json")
    speeds = {(row["policy"], row["concurrency"]) for row in whole["ours"]["speeds"]}
    assert speeds == {(p, c) for p in ("full", "tova") for c in (1, 3)}
    compared = [row["policy"] for row in whole["against_ours"]]
    assert compared == ["full", "tova", "tova:sorted"]
    for kind in ("peer", "speeds"):
        assert "| `tova` |" in tables.render(kind, "file: record.json\n", fake)
    # The server counts an event per request, that of the warm-up before the rounds.
    events = {row["policy"]: row["events"] for row in whole["ours"]["speeds"]}
    assert events == {"full": None, "tova": 4}
    assert command.main(words) == 0 and len(server.bodies) == 18


def ask_ours(folder, *words, policies=("full", "tova"), counts=("1",)):
    """Run `ours` in a folder with a question per task."""
    given = ["ours", "--folder", str(folder), "--tasks", *TASKS, "--budgets", "96"]
    given += ["--n", "1", "--concurrencies", *counts, "--policies", *policies]
    return command.main([*given, *words])


def test_answers_that_were_made_otherwise_do_not_stand_beside(fake, server):
    ask(fake, "--n", "1")
    for words, name in (
        (["--block-size", "16"], "block_size"),
        (["--max-tokens", "9"], "max_tokens"),
        (["--policy-config", '{"window": 16}'], "policy_config"),
        (["--serve-args=--dtype bfloat16"], "serve_args"),
    ):
        with pytest.raises(ValueError, match=f"ours-1.jsonl: expected {name} .* as in"):
            ask_ours(fake, *words)
        (fake / "ours-1.jsonl").unlink()
    assert ask_ours(fake) == 0


def test_what_our_heads_keep_is_the_budget_filled_up_to_blocks():
    settings = {"block_size": 32, "policy_config": {}, "variants": {}}
    line = {"policy": "streaming", "budget": 128, "interval": 64}
    # An event at a prompt's end of 198: local from (198 - 32) // 32 blocks on, 38
    # tokens, and 3 whole blocks for the other 90.
    size = {"prompt_tokens": 198, "output_tokens": 66}
    assert record.kept_of(line | size, settings) == [134, 134]
    size = {"prompt_tokens": 100, "output_tokens": 100}
    assert record.kept_of(line | size, settings) == [128]
    assert record.kept_of(line | size | {"policy": "full"}, settings) == []
    with pytest.raises(ValueError, match="policy: got 'this:Zen', expected a word"):
        record.kept_of(line | size | {"policy": "this:Zen"}, settings)


def test_pairs_with_ours_count_questions_that_both_answered():
    def line(policy, name, correct):
        keys = {"policy": policy, "budget": 96, "interval": 64, "task": "copy:5"}
        return {**keys, "id": name, "sample": 0, "correct": correct}

    theirs = [line("tova:sorted", str(i), i < 3) for i in range(5)]
    own = [line("tova", str(i), i % 2 == 0) for i in range(4)]
    (row,) = joining.against_ours(theirs, own)
    assert (row["pairs"], row["only_peer"], row["only_ours"]) == (4, 1, 0)
    assert not list(joining.against_ours(theirs, [line("knorm", "0", True)]))
