"""Tests of the accuracy run without servers: setups, resumption, summary."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks import accuracy
from benchmarks.accuracy import FULL, Setup
from reasoner.problems import generate
from reasoner.tokenizer import encode

SETTINGS = {"interval": 64}


def line(correct: bool, seed: int, **changes) -> dict:
    """Return a line of the output file."""
    return {
        "policy": "tova",
        "budget": 128,
        "family": "copy",
        "lines": 10,
        "seed": seed,
        "correct": correct,
        "prompt_tokens": 50,
        "output_tokens": 100,
        "capped": not correct,
        **changes,
    }


def run(monkeypatch, arguments: list[str], answered: list) -> None:
    """Run the command with servers and answers faked.

    Args:
        monkeypatch: pytest's.
        arguments: command line.
        answered: gets (server, key fields) of every problem that is asked.
    """

    @contextmanager
    def running(arguments, log_folder):
        (name,) = arguments
        metrics = {"kvpolicy_events_total": 9.0}
        yield {name: SimpleNamespace(url=name, metrics=lambda: metrics)}

    async def ask_all(url, wanted, max_tokens, write):
        for key, _ in wanted:
            answered.append((url, *key.values()))
            write(line(True, 0) | key)

    monkeypatch.setattr(accuracy, "running", running)
    monkeypatch.setattr(accuracy, "ask_all", ask_all)
    accuracy.main(arguments)


def test_a_second_run_asks_only_what_is_missing(monkeypatch, tiny_model, tmp_path):
    out = tmp_path / "out.jsonl"
    common = ["--model", str(tiny_model), "--out", str(out), "--logs", str(tmp_path)]
    common += ["--tasks", "copy:5", "sub:4", "--budgets", "96", "128"]
    first: list = []
    run(monkeypatch, [*common, "--policies", "full", "tova", "--n", "2"], first)
    assert len(first) == len(set(first)) == 3 * 2 * 2
    assert {row[0] for row in first} == {"full", "tova-96", "tova-128"}
    assert ("full", "full", None, "copy", 5, 0) in first
    again: list = []
    run(monkeypatch, [*common, "--policies", "full", "tova", "--n", "2"], again)
    assert again == []
    more: list = []
    run(monkeypatch, [*common, "--policies", "tova", "--n", "3"], more)
    assert {row[-1] for row in more} == {2} and len(more) == 2 * 2
    assert len(out.read_text().splitlines()) == 1 + 12 + 4
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    assert summary["provenance"]["command"].startswith("python -m benchmarks.accuracy")
    assert summary["events_in_this_run"] == {"tova-96": 9.0, "tova-128": 9.0}
    assert sum(row["problems"] for row in summary["summary"]) == 2 * 16


def test_other_settings_do_not_continue_a_file(tmp_path):
    path = tmp_path / "out.jsonl"
    assert accuracy.read_lines(path, SETTINGS) == []
    with pytest.raises(ValueError, match="written with .*64.*, expected .*32"):
        accuracy.read_lines(path, {"interval": 32})


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "out.jsonl"
    accuracy.read_lines(path, SETTINGS)
    whole = json.dumps(line(True, 0)) + "\n"
    with path.open("a") as file:
        file.write(whole + '{"policy": "to')
    assert accuracy.read_lines(path, SETTINGS) == [line(True, 0)]
    assert path.read_text().endswith(whole)


def test_summary_counts_families_and_all():
    lines = [line(seed < 15, seed) for seed in range(20)]
    lines += [line(True, seed, family="sub", output_tokens=50) for seed in range(20)]
    rows = {row["family"]: row for row in accuracy.summarise(lines)}
    assert list(rows) == ["copy:10", "sub:10", "all"]
    assert rows["copy:10"]["correct"] == 15 and rows["copy:10"]["capped"] == 0.25
    assert rows["all"]["problems"] == 40 and rows["all"]["accuracy"] == 35 / 40
    assert rows["all"]["mean_output_tokens"] == 75
    assert rows["copy:10"]["low"] < 0.75 < rows["copy:10"]["high"]
    text = accuracy.format_summary(list(rows.values()))
    assert "| 15/20   | 75.0 [53.1, 88.8]" in text


def test_setups(tiny_model):
    args = accuracy.parse_args(["--policies", "full", "--model", str(tiny_model)])
    args.policy_config = {"expected_window": 48, "hard_p": 0.8}
    stock = Setup((FULL,), None).arguments(args)
    ours = Setup(("tova", "expected"), 128).arguments(args)
    assert ours[: len(stock)] == stock
    config = {"expected_window": 48, "allow": ["expected"]}
    assert ours[len(stock) :] == [
        *("--kv-policy", "tova"),
        *("--kv-budget", "128"),
        *("--kv-interval", "64"),
        *("--kv-policy-config", json.dumps(config)),
    ]


def test_one_server_per_budget_and_tier():
    policies = ["full", "tova", "adakv-snapkv", "keydiff", "hard-tova"]
    setups = accuracy.setups_of(policies, [96, 128])
    equal, ragged = ("tova", "keydiff"), ("adakv-snapkv", "hard-tova")
    assert setups == [
        Setup((FULL,), None),
        *(Setup(names, size) for size in (96, 128) for names in (equal, ragged)),
    ]
    assert setups[1].label == "tova-and-1-more-96"


def test_a_worked_answer_fits_the_limit():
    problem = generate("copy", 20, 0)
    assert accuracy.output_limit(problem) > len(encode(problem.completion)) + 1
