"""Tests of the scenario with too few bytes: requests, servers, ratios, failures.

The whole way with real servers takes minutes on two busy cores and is not run here:

    python -m benchmarks.serving scarce --model FOLDER --pairs 1 --requests 4 \
        --output-tokens 300 --max-model-len 1024 --max-num-seqs 16 --shares 0.8 \
        --budget 128 --interval 64
"""

import json
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import rounds, serving
from benchmarks.load import Completion
from benchmarks.scarce_scenario import SCARCE_SCENARIOS
from benchmarks.server import Server, cause
from benchmarks.verify import VerificationError, verify_caching
from benchmarks.workload import block_bytes
from support.servers.fake_server import FakeServer, serve

SCARCE = SCARCE_SCENARIOS["scarce"]
POLICIES = ("ams-tova", "snapkv", "streaming")
SMALL = replace(
    SCARCE, policies=("snapkv",), requests=3, prompt_tokens=40, output_tokens=6
)
"""Few enough tokens for fakes; its servers are never started."""


def value_of(words: list[str], flag: str) -> str:
    """Return the word after a flag."""
    return words[words.index(flag) + 1]


def test_prompts_are_those_of_vllms_random_data_set(tiny_model):
    workload = SCARCE.workload(tiny_model)
    assert workload.prompt_tokens == (200,) * 16
    assert (workload.output_tokens, workload.at_once) == (600, 16)
    ids = workload.token_ids
    prompts = workload.prompts(1)
    for prompt in prompts:
        first = ids.index(prompt[0])
        assert prompt == [ids[(first + i) % len(ids)] for i in range(200)]
    assert len({prompt[0] for prompt in prompts}) > 8
    assert prompts == workload.prompts(1) != workload.prompts(2)


def test_servers_get_the_same_bytes_and_nothing_else_sets_their_blocks(tiny_model):
    scenario = replace(SCARCE, shares=(1.0, 0.6, 0.4, 0.25))
    servers = scenario.servers(tiny_model, scenario.workload(tiny_model))
    kinds = (*POLICIES, "stock", "stock-fp8")
    shares = ("1", "0.6", "0.4", "0.25")
    assert list(servers) == [f"{kind}@{share}" for kind in kinds for share in shares]
    for name, words in servers.items():
        kind, _, share = name.partition("@")
        # 799 tokens of a request have a place in the cache: 25 blocks of 32.
        blocks = int(16 * 25 * float(share)) + 1
        size = int(value_of(words, "--kv-cache-memory-bytes"))
        assert size == blocks * block_bytes(tiny_model, 32, "bfloat16")
        assert value_of(words, "--max-model-len") == "2048"
        assert value_of(words, "--dtype") == "bfloat16"
        for flag in ("--num-gpu-blocks-override", "--max-num-seqs"):
            assert flag not in words
        assert "--no-enable-prefix-caching" not in words
        assert ("--block-size" in words) == (kind in POLICIES)
        assert ("--kv-cache-dtype" in words) == (kind == "stock-fp8")
        assert ("--kv-policy" in words) == (kind in POLICIES)
    ours = servers["ams-tova@0.4"]
    assert value_of(ours, "--block-size") == "32"
    assert value_of(ours, "--kv-budget") == "256"
    assert value_of(ours, "--kv-interval") == "128"
    assert value_of(servers["stock-fp8@0.4"], "--kv-cache-dtype") == "fp8"


def test_the_default_is_about_120_megabytes_of_smollm2(tmp_path, tiny_model):
    sizes = {"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576}
    config = {**sizes, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = SCARCE.servers(tmp_path, SCARCE.workload(tiny_model))["stock@0.4"]
    assert value_of(words, "--kv-cache-memory-bytes") == str(161 * 32 * 23040)


def test_most_requests_in_a_step_are_an_option(tiny_model):
    words = "scarce --max-num-seqs 16 --shares 0.25 --prompt-tokens 100 --pairs 1"
    found = serving.choose_scenario(serving.parse_args(words.split()))
    assert found == replace(
        SCARCE, max_num_seqs=16, shares=(0.25,), prompt_tokens=100, pairs=1
    )
    for server in found.servers(tiny_model, found.workload(tiny_model)).values():
        assert value_of(server, "--max-num-seqs") == "16"
    with pytest.raises(ValueError, match="--prompt-tokens: .* turns has no such"):
        serving.choose_scenario(serving.parse_args(["turns", "--prompt-tokens", "9"]))


def test_every_field_but_the_name_has_an_option():
    names = {field.name for field in fields(SCARCE)}
    assert names - {"name", "policies"} <= set(serving.OPTIONS)


def test_policies_are_compared_with_stock_and_fp8_and_fp8_with_stock():
    assert replace(SCARCE, shares=(0.6, 0.25), policies=("snapkv",)).comparisons == [
        ("snapkv@0.6", "stock@0.6"),
        ("snapkv@0.6", "stock-fp8@0.6"),
        ("stock-fp8@0.6", "stock@0.6"),
        ("snapkv@0.25", "stock@0.25"),
        ("snapkv@0.25", "stock-fp8@0.25"),
        ("stock-fp8@0.25", "stock@0.25"),
    ]


def test_a_pool_below_one_request_is_refused(tiny_model):
    scenario = replace(SCARCE, shares=(0.1,))
    with pytest.raises(ValueError, match="shares: 0.1 is 40 blocks, expected .* 64"):
        scenario.servers(tiny_model, scenario.workload(tiny_model))


def test_requests_running_are_averaged_over_busy_samples():
    completions = [Completion(0.0, [1, 2], [0.5, 1.0])]
    samples = [{rounds.RUNNING: float(running)} for running in (0, 4, 9, 2, 0)]
    row = rounds.figures(completions, samples, {}, {})
    assert (row["peak_running"], row["mean_running"]) == (9.0, 5.0)
    assert rounds.figures(completions, [], {}, {})["mean_running"] is None


@contextmanager
def faked(arguments, _, failures, fails=()):
    """Stand in for benchmarks.server.running; `fails` do not start."""
    with ExitStack() as stack:
        servers = {}
        for name in arguments:
            if name in fails:
                failures[name] = f"{name}: exited with status 1: ValueError: no room"
                continue
            url = stack.enter_context(
                serve(FakeServer(caches=name.startswith("stock")))
            )
            servers[name] = Server(name, (), url, Path(name), None)
        yield servers


def run(monkeypatch, model, fails):
    """Run the small scenario on fakes."""
    monkeypatch.setattr(serving, "running", lambda *args: faked(*args, fails=fails))
    scenario = replace(SMALL, pairs=2, max_model_len=46, shares=(0.8,))
    return serving.run(scenario, model, Path("logs"))


def test_a_run_compares_paired_rounds(monkeypatch, tiny_model, capsys):
    record = run(monkeypatch, tiny_model, ())
    printed = capsys.readouterr().out
    assert record["did_not_start"] == {}
    assert "did not start" not in printed
    for column in ("preemptions", "mean_running", "blocks", "pool_tokens"):
        assert column in printed.splitlines()[2]
    assert "snapkv@0.8: 2 events, 2 blocks returned" in record["verified"]
    # Other blocks and FP8 may give other tokens.
    assert not any("tokens as" in sentence for sentence in record["verified"])
    rows = {name: server["rounds"] for name, server in record["servers"].items()}
    ratio = record["ratios"]["snapkv@0.8 / stock-fp8@0.8"]["itl_p99_ms"]
    assert ratio["ratios"] == tuple(
        ours["itl_p99_ms"] / theirs["itl_p99_ms"]
        for ours, theirs in zip(rows["snapkv@0.8"], rows["stock-fp8@0.8"], strict=True)
    )
    found = record["servers"]["stock@0.8"]
    assert (found["blocks"], found["block_size"], found["pool_tokens"]) == (20, 32, 640)


@pytest.mark.parametrize(
    "fails, left",
    [
        (["stock-fp8@0.8"], ["snapkv@0.8 / stock@0.8"]),
        (["snapkv@0.8"], ["stock-fp8@0.8 / stock@0.8"]),
        (["snapkv@0.8", "stock-fp8@0.8"], []),
    ],
)
def test_servers_that_do_not_start_are_said(
    fails, left, monkeypatch, tiny_model, capsys
):
    record = run(monkeypatch, tiny_model, fails)
    assert list(record["did_not_start"]) == fails
    assert list(record["ratios"]) == left
    assert not set(fails) & set(record["servers"])
    printed = capsys.readouterr()
    for name in fails:
        why = f"{name}: exited with status 1: ValueError: no room"
        assert record["did_not_start"][name]["why"] == why
        assert why in printed.out and f"did not start: {why}" in printed.err
    assert json.loads(json.dumps(record))["did_not_start"]


def test_stock_must_find_its_prompts_in_its_cache(tiny_model):
    workload = SMALL.workload(tiny_model)
    with ExitStack() as stack:
        url = stack.enter_context(serve(FakeServer()))
        servers = {"stock@0.4": Server("stock@0.4", (), url, Path("x"), None)}
        with pytest.raises(VerificationError, match="stock@0.4: 0 of 0 prompt tokens"):
            verify_caching(SMALL, workload, servers)


ENGINE_FAILED = """\
(APIServer) WARNING found a limit that can cause errors like `OSError: [Errno 24] Too
(EngineCore) ERROR 11-23 [core.py:9] ValueError: to serve one request, 0.05 GiB
(EngineCore) INFO 11-23 bye
(APIServer) RuntimeError: Engine core initialization failed. See root cause above. {}
"""
REFUSED = """\
WARNING such as `OSError: [Errno 24]
error: --kv-policy snapkv is not supported together with:
  - block sizes of 16
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        (ENGINE_FAILED, "ValueError: to serve one request, 0.05 GiB"),
        (REFUSED.replace("WARNING", "x WARNING"), "with: block sizes of 16"),
        ("INFO a\nKilled\n", "Killed"),
        ("", "the log is empty"),
    ],
)
def test_the_cause_is_found_in_a_log(text, expected, tmp_path):
    log = tmp_path / "a.log"
    log.write_text(text)
    assert cause(log).endswith(expected)
