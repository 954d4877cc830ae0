"""Tests of the accuracy command: what it asks, of which server, and only once."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import measured, results, servers, warm
from benchmarks.accuracy.questions import questions_of
from benchmarks.load import LoadError
from support.servers.chat_server import ChatServer, serve

POLICIES = ["--policies", "full", "tova"]


@pytest.fixture
def fake(monkeypatch):
    """A server that stands for every one that a run starts; knows all answers."""
    questions = [
        q for task in ("copy:5", "sub:4") for q in questions_of(task, 9, 0, Path())
    ]
    answers = {q.prompt: f"\\boxed{{{q.answers[0]}}}" for q in questions}
    server = ChatServer(answers=answers)
    server.started = []  # type: ignore[attr-defined]
    with serve(server) as url:

        @contextmanager
        def running(arguments, log_folder):
            ((name, words),) = arguments.items()
            server.started.append((name, words))  # type: ignore[attr-defined]
            yield {name: SimpleNamespace(url=url)}

        monkeypatch.setattr(servers, "running", running)
        server.url = url  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def common(tiny_model, tmp_path):
    words = ["--model", str(tiny_model), "--out", str(tmp_path / "out.jsonl")]
    words += ["--logs", str(tmp_path), "--tasks", "copy:5", "sub:4"]
    return [*words, "--budgets", "96", "128"]


def lines_of(folder, name="out.jsonl"):
    """Return the lines of an output file, checked for answers that come twice."""
    path = folder / name
    return results.parse_file(path, path.read_text())[1]


def test_a_second_run_asks_only_what_is_missing(fake, common, tmp_path):
    assert command.main([*common, *POLICIES, "--n", "2"]) == 0
    assert [name for name, _ in fake.started] == ["full", "tova-96-64", "tova-128-64"]
    # Each server is warmed up with one request.
    assert len(fake.bodies) - 3 == len(lines_of(tmp_path)) == 3 * 2 * 2
    asked = [body.get("vllm_xargs") for body in fake.bodies]
    assert asked.count(None) == 4 + 1
    xargs = {"kv_policy": "tova", "kv_budget": 96, "kv_interval": 64}
    assert asked.count(xargs) == 4 + 1
    before = (tmp_path / "out.jsonl").read_bytes()
    assert command.main([*common, *POLICIES, "--n", "2"]) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert len(fake.bodies) == 15 and len(fake.started) == 3
    assert command.main([*common, "--policies", "tova", "--n", "3"]) == 0
    assert len(fake.bodies) == 15 + 2 * 3
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["provenance"]["command"].startswith("python -m benchmarks.accuracy")
    assert summary["events_in_this_run"] == {"tova-96-64": 2, "tova-128-64": 2}
    assert sum(row["problems"] for row in summary["summary"]) == 2 * 16
    assert all(row["accuracy"] == 1 for row in summary["summary"])
    assert {row["against"] for row in summary["pairs"]} == {"full"}


def test_every_row_has_what_its_server_measured(fake, common, tmp_path, capsys):
    """The warm-up counts for no row; rows of a second run add to those of the first."""
    for number in ("2", "3"):
        assert command.main([*common, *POLICIES, "--n", number]) == 0
    batches = results.batches_of([tmp_path / "out.jsonl"])
    assert [batch["answers"] for batch in batches] == [2] * 6 + [1] * 6
    assert all(batch["requests"] == batch["answers"] for batch in batches)
    rows = json.loads((tmp_path / "out.summary.json").read_text())["summary"]
    for row in rows:
        found = row["measured"]
        assert (found["answers"], found["held_answers"]) == (row["answers"],) * 2
        assert (found["held_tokens"], found["peak_tokens"]) == (96, 128)
        assert found["clients"] == 2 and found["running"] == 2 and found["tok_s"] > 0
        assert found["to_full"]["held_tokens"]["ratio"] == 1
    assert "| peak held | / full" in capsys.readouterr().out


def test_what_failed_is_not_counted_but_asked_again(fake, common, tmp_path, capsys):
    _, bad = questions_of("copy:5", 2, 0, tmp_path)
    fake.faults[bad.prompt] = [400]
    assert command.main([*common, *POLICIES, "--n", "2"]) == 1
    assert f"failed: copy:5 {bad.id}: HTTP 400" in capsys.readouterr().err
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert len(summary["failures_in_this_run"]) == 1
    rows = {(r["policy"], r["budget"], r["family"]): r for r in summary["summary"]}
    assert rows["full", None, "copy:5"]["problems"] == 1
    assert command.main([*common, *POLICIES, "--n", "2"]) == 0
    assert len(lines_of(tmp_path)) == 12 and len(fake.bodies) == 15 + 2


def test_other_settings_do_not_continue_a_file(fake, common):
    command.main([*common, "--policies", "full", "--n", "1"])
    with pytest.raises(ValueError, match="written with .* expected .*; name another"):
        command.main([*common, "--policies", "full", "--n", "1", "--max-tokens", "9"])
    assert len(fake.bodies) == 3


def test_dtypes_events_and_pools_reach_every_server_and_are_recorded(
    fake, common, tmp_path
):
    def settings_and_words(*words):
        out = tmp_path / f"out{words[:1]}.jsonl"
        given = [*common, *POLICIES, "--n", "1", "--out", str(out), *words]
        assert command.main(given) == 0
        started = [words for _, words in fake.started]
        fake.started.clear()
        return results.parse_file(out, out.read_text())[0], started

    plain, started = settings_and_words()
    assert not {"dtype", "kv_cache_dtype"} & plain.keys()
    size = started[0].index("--kv-cache-memory-bytes") + 1
    assert all(words[words.index("--dtype") + 1] == "float32" for words in started)
    assert not any("--kv-cache-dtype" in words for words in started)
    named = ["--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3"]
    settings, other = settings_and_words(*named)
    assert settings == plain | {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}
    assert len(other) == 3
    for words in other:
        assert words[words.index("--dtype") + 1] == "bfloat16"
        assert words[words.index("--kv-cache-dtype") + 1] == "fp8_e4m3"
    assert 2 * int(other[0][size]) == int(started[0][size])
    named = ["--events", "pressure", "--pool-tokens", "4160"]
    settings, other = settings_and_words(*named)
    assert settings == plain | {
        "events": "pressure",
        "pool_tokens": 4160,
        "concurrency": 16,
    }
    assert [words[size] for words in other] == [other[0][size]] * 3
    blocks = started[0][started[0].index("--num-gpu-blocks-override") + 1]
    # The null block is one more.
    assert int(other[0][size]) * int(blocks) == int(started[0][size]) * (130 + 1)
    assert not any("--num-gpu-blocks-override" in words for words in other)
    events = [words[words.index("--kv-events") + 1] for words in other[1:]]
    assert events == ["pressure"] * 2 and "--kv-events" not in other[0]
    for wrong in (["--pool-tokens", "64"], ["--events", "pressure"]):
        with pytest.raises(SystemExit):
            settings_and_words(*wrong)


def test_a_server_that_is_there_already(fake, common, tmp_path):
    given = [*common, "--url", fake.url, "--served-name", "other"]
    assert command.main([*given, *POLICIES, "--n", "1"]) == 0
    assert fake.started == []
    assert {body["model"] for body in fake.bodies} == {"other"}
    asked = [body["vllm_xargs"] for body in fake.bodies]
    assert asked.count({"kv_policy": "none"}) == 3
    fake.floor = 128
    with pytest.raises(LoadError, match="expected a server with --kv-events always"):
        command.main([*given, *POLICIES, "--n", "2"])
    fake.has_policies = False
    with pytest.raises(LoadError, match="expected a server with a KV policy"):
        command.main([*given, *POLICIES, "--n", "2"])
    assert [line["policy"] for line in lines_of(tmp_path)].count("full") == 4


def test_several_samples_differ_and_vote(fake, common, tmp_path):
    more = ["--samples", "3", "--temperature", "0.5", "--n", "1"]
    assert command.main([*common, "--policies", "full", *more]) == 0
    assert len({body["seed"] for body in fake.bodies}) == 6
    assert sorted(line["sample"] for line in lines_of(tmp_path)) == [0, 0, 1, 1, 2, 2]
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert {row["width"] for row in summary["votes"]} == {1, 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*POLICIES, "--tasks", "copy"], "task: expected NAME:SIZE"),
        ([*POLICIES, "--samples", "2"], "samples: expected --temperature above 0"),
        ([*POLICIES, "--url", "http://x", "--dtype", "bfloat16"], "url: expected no"),
        (["--policies", "snapkv:x"], "variants: expected ['x'], which --policies"),
        ([*POLICIES, "--shard", "3/2"], "expected I/N, 1 <= I <= N, got '3/2'"),
    ],
)
def test_bad_arguments_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        command.parse_args(words)
    assert message in capsys.readouterr().err


# -- warm prompts ----------------------------------------------------------------------


def test_warm_answers_are_compared_with_cold_ones(fake, common, tmp_path, monkeypatch):
    """The second server caches prefixes and hears each problem twice."""
    hits = iter(range(0, 1000, 7))
    metrics_of = measured.metrics_of

    def with_hits(url):
        return metrics_of(url) | {measured.HITS: next(hits)}

    monkeypatch.setattr(measured, "metrics_of", with_hits)
    words = [*common[:-1], "--policies", "tova", "snapkv", "--n", "3"]
    assert warm.main(words) == 0
    assert [name for name, _ in fake.started] == 2 * ["tova-and-1-more-96-64"]
    assert [words[-1] for _, words in fake.started].count(
        "--enable-prefix-caching"
    ) == 1
    assert fake.started[1][1][-1] == "--enable-prefix-caching"
    assert len(fake.bodies) == 12 + 2 * 12 + 2  # each server is warmed up, too
    rows = json.loads((tmp_path / "out.warm.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["tova", "snapkv"]
    for row in rows:
        counts = [row[key] for key in ("problems", "same_text", "right_warm")]
        assert counts == [6, 6, 6] and row["hit_tokens"] == 2 * 7
        assert row["differing"] == []
    path = tmp_path / "out.warm.jsonl"
    before, changed, after = path.read_text().partition("boxed")
    path.write_text(before + "another" + after)
    assert changed and warm.main(words) == 1
    assert len(fake.bodies) == 38, "nothing was missing"
    rows = json.loads((tmp_path / "out.warm.json").read_text())["rows"]
    assert [row["same_text"] for row in rows] == [5, 6]
    assert len(rows[0]["differing"]) == 1
