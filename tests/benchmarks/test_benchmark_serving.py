"""Tests of the comparison: verification, rounds, figures, tables, provenance.

The whole way with real servers takes minutes on two busy cores and is not run here:

    python -m benchmarks.serving pressure --pairs 1 --requests 4 \
        --output-tokens 400 --max-model-len 704
"""

import json
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import columns, printing, provenance, rounds, serving
from benchmarks.load import Completion
from benchmarks.scenarios import SCENARIOS
from benchmarks.server import Server
from benchmarks.verify import VerificationError, verify
from benchmarks.workload import Workload
from support.servers.fake_server import FakeServer, serve

WORKLOAD = Workload(tuple(range(5, 50)), (4, 9), output_tokens=6, seed=0)
PRESSURE = replace(SCENARIOS["pressure"], policies=("ams-tova",), output_tokens=6)
NEUTRAL = replace(SCENARIOS["neutral"], output_tokens=6)


def start(stack: ExitStack, fakes: dict[str, FakeServer]) -> dict[str, Server]:
    """Return servers whose HTTP side is faked."""
    return {
        name: Server(name, (), stack.enter_context(serve(fake)), Path(name), None)
        for name, fake in fakes.items()
    }


def test_servers_take_turns_after_a_warm_up(capsys):
    with ExitStack() as stack:
        fakes = {name: FakeServer() for name in ("ams-tova", "stock", "default")}
        servers = start(stack, fakes)
        rows = rounds.compare(servers, WORKLOAD, pairs=4)
    lines = capsys.readouterr().err.splitlines()
    order = [line.split(": ")[1].split()[0] for line in lines]
    a, b, c = fakes
    assert order == [a, b, c, b, c, a, c, a, b, a, b, c, b, c, a]
    assert [line.split(":")[0] for line in lines[:4]] == ["warm-up"] * 3 + ["pair 1/4"]
    for name, fake in fakes.items():
        assert len(rows[name]) == 4 and fake.finished == 5 * 2
        assert all(row["steps"] == 12 and row["events"] == 2 for row in rows[name])
        assert all(row["kept_ratio"] == 0.75 for row in rows[name])


def test_figures_are_growth_in_the_round():
    completions = [Completion(0.0, [1, 2], [0.5, 1.0])]
    before = {"vllm:num_preemptions_total": 3.0, "kvpolicy_events_total": 4.0}
    after = {
        "vllm:num_preemptions_total": 5.0,
        "kvpolicy_events_total": 4.0,
        "kvpolicy_tokens_kept_total": 0.0,
        "kvpolicy_tokens_dropped_total": 0.0,
        "vllm:inter_token_latency_seconds_sum": 0.3,
        "vllm:inter_token_latency_seconds_count": 100.0,
    }
    samples = [
        {"vllm:num_requests_running": 2.0, "kvpolicy_keep_ratio": 0.5},
        {"vllm:num_requests_running": 8.0, "kvpolicy_keep_ratio": 0.2},
        {"vllm:num_requests_running": 0.0, "kvpolicy_keep_ratio": 0.1},
    ]
    row = rounds.figures(completions, samples, before, after)
    assert row["output_tok_s"] == 2.0
    assert (row["preemptions"], row["events"]) == (2.0, 0.0)
    assert row["steps"] is None and row["server_ttft_ms"] is None
    assert row["server_itl_ms"] == pytest.approx(3.0)
    assert row["kept_ratio"] is None
    assert (row["peak_running"], row["least_held_ratio"]) == (8.0, 0.2)
    assert row["peak_kv_usage"] is None
    idle = [{"vllm:num_requests_running": 0.0}]
    assert rounds.figures(completions, idle, before, after)["peak_running"] is None


def test_report_shows_every_column_and_both_baselines():
    full = dict.fromkeys(columns.TABLE_COLUMNS, 2.0)
    rows = {
        "ams-tova": [full, full],
        "stock": [dict.fromkeys(full, 1.0)] * 2,
        "default": [full | {"events": None}, full | {"events": None}],
    }
    summaries = {name: rounds.summarise(of_server) for name, of_server in rows.items()}
    ratios = rounds.ratios_to(rows, NEUTRAL.comparisons, columns.RATIO_COLUMNS, seed=0)
    text = printing.report(summaries, ratios, columns.TABLE_COLUMNS)
    for column in (*columns.TABLE_COLUMNS, *columns.RATIO_COLUMNS):
        assert column in text
    assert "| ams-tova / stock   | 2.000 [2.000, 2.000]" in text
    assert "| ams-tova / default | 1.000 [1.000, 1.000]" in text
    default = next(line for line in text.splitlines() if line.startswith("| default "))
    events = list(columns.TABLE_COLUMNS).index("events")
    assert default.split("|")[events + 2].strip() == "-"


def test_verification_under_pressure():
    with ExitStack() as stack:
        names = ("ams-tova", "stock", "default", "ample")
        fakes = {name: FakeServer() for name in names}
        passed = verify(PRESSURE, WORKLOAD, start(stack, fakes))
    assert "stock: tokens as ample" in passed
    assert "ams-tova: 2 events, 2 blocks returned" in passed
    assert "ams-tova without its policy: tokens as stock" in passed
    assert fakes["ams-tova"].bodies[-1]["vllm_xargs"] == {"kv_policy": "none"}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("ample", "stock and ample differ in request 0 from output token 0"),
        ("ams-tova", "ams-tova without its policy and stock differ in request 0"),
    ],
)
def test_other_tokens_fail_the_verification_under_pressure(wrong, message):
    with ExitStack() as stack:
        names = ("ams-tova", "stock", "default", "ample")
        fakes = {name: FakeServer(8 if name == wrong else 7) for name in names}
        servers = start(stack, fakes)
        with pytest.raises(VerificationError, match=message):
            verify(PRESSURE, WORKLOAD, servers)


def test_events_fail_the_verification_of_a_budget_that_is_never_reached():
    with ExitStack() as stack:
        fakes = {name: FakeServer() for name in ("ams-tova", "stock", "default")}
        servers = start(stack, fakes)
        with pytest.raises(VerificationError, match="ams-tova: 2 events, wanted 0"):
            verify(NEUTRAL, WORKLOAD, servers)


def test_other_tokens_fail_the_verification_of_a_budget_that_is_never_reached():
    with ExitStack() as stack:
        fakes = {"ams-tova": FakeServer(8), "stock": FakeServer()}
        servers = start(stack, fakes)
        with pytest.raises(VerificationError, match="ams-tova and stock differ"):
            verify(NEUTRAL, WORKLOAD, servers)


def test_command_line_changes_the_scenario():
    args = serving.parse_args(
        ["pressure", "--pairs", "7", "--policies", "tova", "--max-model-len", "4096"]
    )
    scenario = serving.choose_scenario(args)
    expected = replace(
        SCENARIOS["pressure"], pairs=7, policies=("tova",), max_model_len=4096
    )
    assert scenario == expected
    unchanged = serving.choose_scenario(serving.parse_args(["neutral"]))
    assert unchanged == SCENARIOS["neutral"]


@pytest.mark.parametrize(
    "words",
    [
        ["pressure", "--turns", "3"],
        ["turns", "--requests", "3"],
        ["neutral", "--shares", "0.5"],
    ],
)
def test_an_option_of_another_scenario_is_refused(words):
    with pytest.raises(
        ValueError, match=f"{words[1]}: .* {words[0]} has no such value"
    ):
        serving.choose_scenario(serving.parse_args(words))


def test_provenance_names_command_versions_and_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "pressure", "--out", "a b.json"])
    found = json.loads(json.dumps(provenance.collect("benchmarks.serving")))
    assert found["command"] == "python -m benchmarks.serving pressure --out 'a b.json'"
    assert found["vllm"].startswith("0.32")
    for key in ("python", "torch", "vllm-kvpolicy", "cpu", "started"):
        assert found[key]
    assert found["cores"] >= 1


def test_provenance_lives_without_git(monkeypatch):
    def no_git(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", no_git)
    found = provenance.collect("benchmarks.serving")
    assert found["git_commit"] is None and found["git_clean"] is None
    assert provenance.package_version("no-such-distribution") is None
