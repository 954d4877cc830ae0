"""Tests of `benchmarks.serving`: requests, servers, verification, rounds, figures.

The whole way with real servers takes minutes on two busy cores and is not run here:

    python -m benchmarks.serving pressure --pairs 1 --requests 4 \
        --output-tokens 400 --max-model-len 704
    python -m benchmarks.serving turns --pairs 1 --conversations 3 --turns 3 \
        --first-tokens 256 --output-tokens 96 --thinking-tokens 64 \
        --budget 128 --interval 64 --shares 1
    python -m benchmarks.serving scarce --model FOLDER --pairs 1 --requests 4 \
        --output-tokens 300 --max-model-len 1024 --max-num-seqs 16 --shares 0.8 \
        --budget 128 --interval 64
    python -m benchmarks.serving speculation --pairs 1 --requests 4 --output-tokens 300
"""

import asyncio
import json
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import rounds, serving
from benchmarks.caching_scenarios import CACHING_SCENARIOS
from benchmarks.load import Completion
from benchmarks.scarce_scenario import SCARCE_SCENARIOS
from benchmarks.scenarios import AMPLE_SHARE, SCENARIOS
from benchmarks.server import Server, cause
from benchmarks.shared_prompts import Conversations, SharedPrefixes
from benchmarks.speculation_scenario import SPECULATION_SCENARIOS
from benchmarks.verify import VerificationError, verify, verify_caching
from benchmarks.workload import Workload, block_bytes, blocks_needed, pool_blocks
from support.servers.fake_server import FakeServer, serve

IDS = tuple(range(5, 400))
WORKLOAD = Workload(IDS, (4, 9), output_tokens=6, seed=0)
PREFIXES = SharedPrefixes(
    token_ids=IDS,
    prefixes=3,
    prefix_tokens=10,
    suffix_tokens=4,
    output_tokens=6,
    requests=8,
    at_once=2,
    seed=0,
)
TURNS = Conversations(
    token_ids=IDS,
    conversations=2,
    turns=3,
    first_tokens=12,
    message_tokens=4,
    output_tokens=6,
    thinking_tokens=4,
    seed=0,
)
WORKLOADS = {"prefixes": PREFIXES, "turns": TURNS}
PRESSURE = replace(SCENARIOS["pressure"], policies=("ams-tova",), output_tokens=6)
NEUTRAL = replace(SCENARIOS["neutral"], output_tokens=6)
SCARCE = SCARCE_SCENARIOS["scarce"]
POLICIES = ("ams-tova", "snapkv", "streaming")
SMALL = replace(
    SCARCE, policies=("snapkv",), requests=3, prompt_tokens=40, output_tokens=6
)
"""Few enough tokens for fakes; its servers are never started."""
SPECULATION = SPECULATION_SCENARIOS["speculation"]


@pytest.fixture
def start():
    """Return what makes servers whose HTTP side is faked."""
    with ExitStack() as stack:
        yield lambda fakes: {
            name: Server(name, (), stack.enter_context(serve(fake)), Path(name), None)
            for name, fake in fakes.items()
        }


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def fakes_of(scenario) -> dict[str, FakeServer]:
    """Return the fakes of a scenario's servers; stock caches, policies do not."""
    return {
        f"{kind}@{share:g}": FakeServer(caches=kind == "stock")
        for kind in (*scenario.policies, *scenario.baselines)
        for share in scenario.shares
    }


# -- requests and pools ----------------------------------------------------------------


def test_half_a_pool_has_the_null_block_on_top():
    # 1024 tokens with a place in the cache fill 32 blocks, one more a block of its own.
    assert pool_blocks([25, 25], 1000, 32, share=0.5) == 32 + 1
    assert pool_blocks([25, 26], 1000, 32, share=0.5) == 32 + 1
    assert pool_blocks([26, 26], 1000, 32, share=2.0) == 2 * (33 + 33) + 1
    assert pool_blocks([1], 1, 16, share=1.0) == 1 + 1


def test_block_bytes(tiny_model):
    # Keys and values, 2 layers, 2 KV heads of size 32, 4 bytes each.
    assert block_bytes(tiny_model, 16) == 2 * 2 * 2 * 32 * 16 * 4
    assert block_bytes(tiny_model, 16, "bfloat16") == 2 * 2 * 2 * 32 * 16 * 2


def test_rounds_share_lengths_but_not_contents():
    workload = Workload(IDS, (40, 300), 10, seed=1)
    first, second = workload.prompts(1), workload.prompts(2)
    assert [len(prompt) for prompt in first + second] == [40, 300, 40, 300]
    assert first == workload.prompts(1)
    assert first != second
    assert first != replace(workload, seed=2).prompts(1)
    assert set(first[1]) <= set(workload.token_ids)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_no_round_finds_tokens_of_another(workload):
    def leading(number):
        if workload is PREFIXES:
            return {tuple(prompt[:4]) for prompt in workload.prompts(number)}
        return {tuple(first[:4]) for first, *_ in workload.messages(number)}

    rounds_of = [leading(number) for number in (-1, 0, 1, 2)]
    assert len(set.union(*rounds_of)) == sum(map(len, rounds_of))
    assert leading(1) == leading(1)
    few = workload.few()
    assert few.seed == workload.seed and few.prompt_tokens[0] == len(
        few.prompts(0)[0] if workload is PREFIXES else few.messages(0)[0][0]
    )


def test_prompts_grow_by_answers_without_thinking():
    assert TURNS.prompt_tokens == (12, 12 + 2 + 4, 12 + 2 * (2 + 4))
    assert TURNS.longest == 24 + 6
    assert TURNS.needed_blocks(4) == 2 * 8
    fake = FakeServer()
    with serve(fake) as url:
        asyncio.run(TURNS.play(url, 1, dict))
    lengths = sorted(len(body["prompt"]) for body in fake.bodies)
    assert lengths == sorted(TURNS.prompt_tokens * 2)
    assert all(body["max_tokens"] == 6 for body in fake.bodies)


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


def test_prompts_repeat_a_unit_each(tiny_model):
    workload = SPECULATION.workload(tiny_model)
    prompts = workload.prompts(1)
    assert [len(prompt) for prompt in prompts] == [200] * 8
    for prompt in prompts:
        assert prompt[24:] == prompt[:-24]
        assert len(set(prompt[:24])) > 12
    assert len({tuple(prompt) for prompt in prompts}) == 8
    assert prompts == workload.prompts(1) != workload.prompts(2)
    first, second = workload.few().prompts(0)
    assert first == second  # for the second, a prefix cache has the first


# -- servers ---------------------------------------------------------------------------


def test_servers_under_pressure(tiny_model):
    scenario = SCENARIOS["pressure"]
    workload = scenario.workload(tiny_model)
    servers = scenario.servers(tiny_model, workload)
    assert list(servers) == ["streaming", "ams-tova", "stock", "default", "ample"]
    assert scenario.comparisons[0] == ("ample", "stock")
    assert not scenario.checked_servers(tiny_model, workload)
    needed = blocks_needed(workload.prompt_tokens, 1000, 32)
    for name in ("streaming", "ams-tova", "stock"):
        words = servers[name]
        assert value_of(words, "--block-size") == "32"
        assert "--no-enable-prefix-caching" in words
        blocks = int(value_of(words, "--num-gpu-blocks-override"))
        assert blocks == needed // 2 + 1
    for flag, value in (("policy", "ams-tova"), ("budget", "128"), ("interval", "64")):
        assert value_of(servers["ams-tova"], f"--kv-{flag}") == value
    for name in ("stock", "default"):
        assert not any(word.startswith("--kv-policy") for word in servers[name])
    ample = servers.pop("ample")
    sizes = {value_of(words, "--kv-cache-memory-bytes") for words in servers.values()}
    assert sizes == {str(blocks * block_bytes(tiny_model, 32))}
    of_others = {"--block-size", "--num-gpu-blocks-override"}
    assert not {*of_others, "--no-enable-prefix-caching"} & {*servers["default"]}
    blocks = int(value_of(ample, "--num-gpu-blocks-override"))
    assert blocks == needed * AMPLE_SHARE + 1


@pytest.mark.parametrize("name", ["prefixes", "turns"])
def test_servers_at_each_share(name, tiny_model):
    scenario = replace(CACHING_SCENARIOS[name], uncached=True, policy_config="{}")
    workload = scenario.workload(tiny_model)
    servers = scenario.servers(tiny_model, workload)
    kinds = ("ams-tova", "stock", "uncached")
    assert list(servers) == [f"{kind}@{share}" for kind in kinds for share in (1, 0.4)]
    needed = workload.needed_blocks(32)
    for label, words in servers.items():
        share = float(label.partition("@")[2])
        blocks = int(value_of(words, "--num-gpu-blocks-override"))
        assert blocks == int(needed * share) + 1
        size = int(value_of(words, "--kv-cache-memory-bytes"))
        assert size == blocks * block_bytes(tiny_model, 32)
        assert value_of(words, "--block-size") == "32"
        assert value_of(words, "--max-model-len") == str(workload.longest)
        # Only what says so has no prefix cache.
        off = "--no-enable-prefix-caching" in words
        assert off == label.startswith("uncached")
        assert ("--kv-policy" in words) == label.startswith("ams-tova")
    ours = servers["ams-tova@0.4"]
    assert value_of(ours, "--kv-budget") == "512"
    assert value_of(ours, "--kv-interval") == "128"
    assert value_of(ours, "--kv-policy-config") == "{}"
    # Every policy has an event, and all sizes fit a model of 2,048 positions.
    assert max(workload.prompt_tokens) >= 512 + 128 and workload.longest <= 2048


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


def test_a_label_says_which_events_and_which_cache_its_server_has(tiny_model):
    scenario = replace(SCARCE_SCENARIOS["long"], output_tokens=1000)
    workload = scenario.workload(tiny_model)
    servers = scenario.servers(tiny_model, workload)
    labels = ("ams-tova", "ams-tova:pressure", "ams-tova:pressure:fp8")
    assert list(servers) == [f"{x}@0.4" for x in (*labels, "stock", "stock-fp8")]
    for label in labels:
        words = servers[f"{label}@0.4"]
        assert value_of(words, "--kv-policy") == "ams-tova"
        events = "pressure" if ":pressure" in label else "always"
        assert value_of(words, "--kv-events") == events and words.count(events) == 1
        assert ("--kv-cache-dtype" in words) == (":fp8" in label)
    scenario = replace(scenario, policies=("ams-tova:fp4",))
    with pytest.raises(ValueError, match=r"not \['fp4'\]"):
        scenario.servers(tiny_model, workload)


def test_all_servers_draft_alike(tiny_model):
    args = serving.parse_args(
        ["speculation", "--policies", "snapkv", "--drafts", "3", "--shares", "2", "0.5"]
    )
    scenario = serving.choose_scenario(args)
    servers = scenario.servers(tiny_model, scenario.workload(tiny_model))
    assert list(servers) == ["snapkv@2", "snapkv@0.5", "stock@2", "stock@0.5"]
    for name, words in servers.items():
        config = json.loads(words[words.index("--speculative-config") + 1])
        assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 3)
        assert ("--kv-policy" in words) == name.startswith("snapkv")
        blocks = int(words[words.index("--num-gpu-blocks-override") + 1])
        # 799 tokens of a request have a place in the cache: 25 blocks of 32.
        assert blocks == int(8 * 25 * float(name.partition("@")[2])) + 1
    assert scenario.comparisons == [
        ("snapkv@2", "stock@2"),
        ("snapkv@0.5", "stock@0.5"),
        ("snapkv@0.5", "stock@2"),
    ]


@pytest.mark.parametrize(
    "scenario, changes, message",
    [
        (SCENARIOS["pressure"], {"max_model_len": 1100}, "got 1100, expected at least"),
        (SCENARIOS["pressure"], {"requests": 2}, "2048 tokens take 64 blocks, the po"),
        (CACHING_SCENARIOS["prefixes"], {"shares": (0.1,)}, "shares: 0.1 is 28 blocks"),
        (CACHING_SCENARIOS["turns"], {"turns": 1}, "turns: got 1, expected at least 2"),
        (SCARCE, {"shares": (0.1,)}, "shares: 0.1 is 40 blocks, expected .* 64"),
    ],
)
def test_what_cannot_be_served_is_refused(scenario, changes, message, tiny_model):
    scenario = replace(scenario, **changes)
    with pytest.raises(ValueError, match=message):
        scenario.servers(tiny_model, scenario.workload(tiny_model))


def test_an_option_of_another_scenario_is_refused():
    with pytest.raises(ValueError, match="--turns: .* pressure has no such value"):
        serving.choose_scenario(serving.parse_args(["pressure", "--turns", "3"]))


# -- verification ----------------------------------------------------------------------


def test_verification_under_pressure(start):
    names = ("ams-tova", "stock", "default", "ample")
    fakes = {name: FakeServer() for name in names}
    passed = verify(PRESSURE, WORKLOAD, start(fakes))
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
def test_other_tokens_fail_the_verification_under_pressure(wrong, message, start):
    names = ("ams-tova", "stock", "default", "ample")
    fakes = {name: FakeServer(8 if name == wrong else 7) for name in names}
    servers = start(fakes)
    with pytest.raises(VerificationError, match=message):
        verify(PRESSURE, WORKLOAD, servers)


def test_events_fail_the_verification_of_a_budget_that_is_never_reached(start):
    fakes = {name: FakeServer() for name in ("ams-tova", "stock", "default")}
    servers = start(fakes)
    with pytest.raises(VerificationError, match="ams-tova: 2 events, wanted 0"):
        verify(NEUTRAL, WORKLOAD, servers)


@pytest.mark.parametrize("name", ["prefixes", "turns"])
def test_verification_of_caches(name, start):
    scenario = CACHING_SCENARIOS[name]
    fakes = fakes_of(scenario)
    passed = verify_caching(scenario, WORKLOADS[name], start(fakes))
    found = {"prefixes": "10 of 28", "turns": "30 of 54"}[name]
    assert f"stock@0.4: {found} prompt tokens found in the cache" in passed
    assert "ams-tova@1: 0 of 0 prompt tokens found in the cache" in passed
    events = {"prefixes": 2, "turns": 3}[name]
    assert f"ams-tova@1: {events} events, {events} blocks returned" in passed
    assert "ams-tova@0.4 without its policy: tokens as stock@1" in passed
    assert "stock@0.4: tokens as stock@1" in passed
    assert fakes["ams-tova@1"].bodies[-1]["vllm_xargs"] == {"kv_policy": "none"}


@pytest.mark.parametrize("wrong", ["stock@0.4", "ams-tova@1"])
def test_other_tokens_fail_the_verification_in_float32_only(wrong, start):
    scenario = CACHING_SCENARIOS["prefixes"]
    fakes = fakes_of(scenario)
    fakes[wrong].first_token = 8
    servers = start(fakes)
    with pytest.raises(VerificationError, match="differ in request 0 from output"):
        verify_caching(scenario, PREFIXES, servers)
    passed = verify_caching(replace(scenario, dtype="bfloat16"), PREFIXES, servers)
    assert not any("tokens as" in sentence for sentence in passed)


def test_one_request_alone_has_no_called_event(start):
    scenario = replace(CACHING_SCENARIOS["prefixes"], dtype="bfloat16")
    servers = start(fakes_of(scenario))
    name = "ams-tova@1"
    servers[name] = replace(servers[name], arguments=("--kv-events", "pressure"))
    with pytest.raises(VerificationError, match="ams-tova@1: 2 events, 2 blocks"):
        verify_caching(scenario, PREFIXES, servers)


# -- rounds and figures ----------------------------------------------------------------


def test_servers_take_turns_after_a_warm_up(capsys, start):
    fakes = {name: FakeServer() for name in ("ams-tova", "stock", "default")}
    servers = start(fakes)
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
    # Means are over samples in which something runs.
    running = row["peak_running"], row["mean_running"]
    assert (*running, row["least_held_ratio"]) == (8.0, 5.0, 0.2)
    assert row["peak_kv_usage"] is None
    for idle in ([{"vllm:num_requests_running": 0.0}], []):
        row = rounds.figures(completions, idle, before, after)
        assert row["peak_running"] is row["mean_running"] is None


def test_hits_of_a_round_are_counted(start):
    fakes = {"stock@1": FakeServer(caches=True), "ams-tova@1": FakeServer()}
    servers = start(fakes)
    rows = rounds.compare(servers, TURNS, pairs=2)
    for row in rows["stock@1"]:
        assert row["queried_tokens"] == 2 * (12 + 18 + 24)
        # A later prompt finds the one before it, of which nothing else is cached.
        assert row["hit_tokens"] == 2 * (12 + 18)
        assert row["hit_ratio"] == 60 / 108
        assert row["ttft_first_ms"] > 0 and row["ttft_later_p99_ms"] > 0
    for row in rows["ams-tova@1"]:
        assert row["hit_tokens"] == 0 and row["hit_ratio"] is None


def test_the_share_of_right_drafts_is_a_figure():
    completions = [Completion(0.0, [1, 2], [0.5, 1.0])]
    drafted = "vllm:spec_decode_num_draft_tokens_total"
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before, after = {drafted: 10.0, accepted: 4.0}, {drafted: 50.0, accepted: 14.0}
    row = rounds.figures(completions, [], before, after)
    assert (row["drafted"], row["accepted_ratio"]) == (40.0, 0.25)
    assert rounds.figures(completions, [], {}, {})["accepted_ratio"] is None
    assert {*SPECULATION.columns, *SPECULATION.ratio_columns} <= {*row, "blocks"}


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


def test_servers_that_do_not_start_are_said(monkeypatch, tiny_model, capsys):
    fails, left = ["stock-fp8@0.8"], ["snapkv@0.8 / stock@0.8"]
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
