"""Tests of the scenarios in which prompts begin alike: requests, servers, hits.

The whole way with real servers takes minutes on two busy cores and is not run here:

    python -m benchmarks.serving turns --pairs 1 --conversations 3 --turns 3 \
        --first-tokens 256 --output-tokens 96 --thinking-tokens 64 \
        --budget 128 --interval 64 --shares 1
"""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import printing, rounds, serving
from benchmarks.caching_scenarios import CACHING_SCENARIOS
from benchmarks.load import Completion
from benchmarks.server import Server
from benchmarks.shared_prompts import Conversations, SharedPrefixes
from benchmarks.verify import VerificationError, verify_caching
from benchmarks.workload import block_bytes
from support.servers.fake_server import FakeServer, serve

IDS = tuple(range(5, 400))
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


def start(stack: ExitStack, fakes: dict[str, FakeServer]) -> dict[str, Server]:
    """Return servers whose HTTP side is faked."""
    return {
        name: Server(name, (), stack.enter_context(serve(fake)), Path(name), None)
        for name, fake in fakes.items()
    }


def value_of(words: list[str], flag: str) -> str:
    """Return the word after a flag."""
    return words[words.index(flag) + 1]


def test_requests_are_spread_over_the_prefixes():
    prompts = PREFIXES.prompts(1)
    assert [len(prompt) for prompt in prompts] == list(PREFIXES.prompt_tokens)
    starts = [tuple(prompt[:10]) for prompt in prompts]
    assert sorted(map(starts.count, set(starts))) == [2, 3, 3]
    assert len({tuple(prompt[10:]) for prompt in prompts}) == 8
    # In random order, and not one prefix after the other.
    assert starts != [starts[number % 3] for number in range(8)]
    assert starts != sorted(starts, key=starts.index)


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


def test_blocks_are_counted_for_each_request_at_once():
    # 14 + 6 - 1 tokens are 5 blocks of 4.
    assert PREFIXES.needed_blocks(4) == 2 * 5
    assert replace(PREFIXES, at_once=6).needed_blocks(4) == 6 * 5
    assert replace(PREFIXES, at_once=99).needed_blocks(4) == 8 * 5
    assert PREFIXES.longest == 20


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


def test_hits_of_a_round_are_counted():
    with ExitStack() as stack:
        fakes = {"stock@1": FakeServer(caches=True), "ams-tova@1": FakeServer()}
        servers = start(stack, fakes)
        rows = rounds.compare(servers, TURNS, pairs=2)
    for row in rows["stock@1"]:
        assert row["queried_tokens"] == 2 * (12 + 18 + 24)
        # A later prompt finds the one before it, of which nothing else is cached.
        assert row["hit_tokens"] == 2 * (12 + 18)
        assert row["hit_ratio"] == 60 / 108
        assert row["ttft_first_ms"] > 0 and row["ttft_later_p99_ms"] > 0
    for row in rows["ams-tova@1"]:
        assert row["hit_tokens"] == 0 and row["hit_ratio"] is None


def test_hits_are_growth_in_the_round():
    completions = [Completion(0.0, [1, 2], [0.5, 1.0])]
    queries, hits = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    before, after = {queries: 300.0, hits: 50.0}, {queries: 500.0, hits: 200.0}
    row = rounds.figures(completions, [], before, after)
    assert (row["queried_tokens"], row["hit_tokens"]) == (200.0, 150.0)
    assert row["hit_ratio"] == 0.75
    without = rounds.figures(completions, [], {}, {})
    assert without["hit_tokens"] is None and without["hit_ratio"] is None


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


def test_the_shape_is_that_of_vllms_data_set(tiny_model):
    workload = CACHING_SCENARIOS["prefixes"].workload(tiny_model)
    assert workload.prompt_tokens == (1024 + 64,) * 24
    assert (workload.prefixes, workload.output_tokens, workload.at_once) == (3, 64, 8)


def test_policies_are_compared_at_equal_shares_and_with_all_of_stocks_memory():
    scenario = CACHING_SCENARIOS["turns"]
    assert scenario.comparisons == [
        ("ams-tova@1", "stock@1"),
        ("ams-tova@0.4", "stock@0.4"),
        ("ams-tova@0.4", "stock@1"),
    ]
    more = replace(scenario, uncached=True, shares=(1.0,)).comparisons
    assert more == [("ams-tova@1", "stock@1"), ("ams-tova@1", "uncached@1")]


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("prefixes", {"prefix_tokens": 5000}, "got 5128, expected 5128 .* to 4096"),
        ("prefixes", {"max_model_len": 1000}, "got 1000, expected 1152 .* to 4096"),
        ("turns", {"first_tokens": 5000}, "--turns and --first-tokens and"),
        ("prefixes", {"shares": (0.1,)}, "shares: 0.1 is 28 blocks, expected at least"),
        ("prefixes", {"requests": 2}, "requests: got 2, expected at least 3"),
        ("turns", {"turns": 1}, "turns: got 1, expected at least 2"),
        ("turns", {"thinking_tokens": 192}, "thinking_tokens: got 192, expected 0 to"),
    ],
)
def test_what_cannot_be_served_is_refused(name, changes, message, tiny_model):
    scenario = replace(CACHING_SCENARIOS[name], **changes)
    with pytest.raises(ValueError, match=message):
        scenario.servers(tiny_model, scenario.workload(tiny_model))


def fakes_of(scenario) -> dict[str, FakeServer]:
    """Return the fakes of a scenario's servers; stock caches, policies do not."""
    return {
        f"{kind}@{share:g}": FakeServer(caches=kind == "stock")
        for kind in (*scenario.policies, *scenario.baselines)
        for share in scenario.shares
    }


@pytest.mark.parametrize("name", ["prefixes", "turns"])
def test_verification(name):
    scenario = CACHING_SCENARIOS[name]
    fakes = fakes_of(scenario)
    with ExitStack() as stack:
        passed = verify_caching(scenario, WORKLOADS[name], start(stack, fakes))
    found = {"prefixes": "10 of 28", "turns": "30 of 54"}[name]
    assert f"stock@0.4: {found} prompt tokens found in the cache" in passed
    assert "ams-tova@1: 0 of 0 prompt tokens found in the cache" in passed
    events = {"prefixes": 2, "turns": 3}[name]
    assert f"ams-tova@1: {events} events, {events} blocks returned" in passed
    assert "ams-tova@0.4 without its policy: tokens as stock@1" in passed
    assert "stock@0.4: tokens as stock@1" in passed
    assert fakes["ams-tova@1"].bodies[-1]["vllm_xargs"] == {"kv_policy": "none"}


@pytest.mark.parametrize("wrong", ["stock@0.4", "ams-tova@1"])
def test_other_tokens_fail_the_verification_in_float32_only(wrong):
    scenario = CACHING_SCENARIOS["prefixes"]
    fakes = fakes_of(scenario)
    fakes[wrong].first_token = 8
    with ExitStack() as stack:
        servers = start(stack, fakes)
        with pytest.raises(VerificationError, match="differ in request 0 from output"):
            verify_caching(scenario, PREFIXES, servers)
        passed = verify_caching(replace(scenario, dtype="bfloat16"), PREFIXES, servers)
    assert not any("tokens as" in sentence for sentence in passed)


def test_stock_without_hits_fails_the_verification():
    scenario = CACHING_SCENARIOS["turns"]
    fakes = fakes_of(scenario)
    fakes["stock@1"].caches = False
    with ExitStack() as stack:
        servers = start(stack, fakes)
        with pytest.raises(VerificationError, match="stock@1: 0 of 0 prompt tokens"):
            verify_caching(scenario, TURNS, servers)


def test_report_shows_hits_and_turns():
    scenario = replace(CACHING_SCENARIOS["turns"], shares=(1.0,))
    with ExitStack() as stack:
        rows = rounds.compare(start(stack, fakes_of(scenario)), TURNS, pairs=2)
    summaries = {name: rounds.summarise(of_server) for name, of_server in rows.items()}
    ratios = rounds.ratios_to(
        rows, scenario.comparisons, scenario.ratio_columns, seed=0
    )
    text = printing.report(summaries, ratios, scenario.columns)
    header, _, ours, stock = text.split("\n\n")[1].splitlines()
    for column in ("hit_tokens", "hit_ratio", "ttft_first_ms", "ttft_later_p99_ms"):
        assert column in header
    assert "| 60 " in stock and "| 0.556 " in stock and "| 0 " in ours
    assert "| ams-tova@1 / stock@1 |" in text
    assert json.loads(json.dumps(rows)) == rows


def test_command_line_changes_the_scenario():
    words = "turns --shares 1 0.5 --dtype bfloat16 --turns 4 --uncached --pairs 2"
    found = serving.choose_scenario(serving.parse_args(words.split()))
    assert found == replace(
        CACHING_SCENARIOS["turns"],
        shares=(1.0, 0.5),
        dtype="bfloat16",
        turns=4,
        uncached=True,
        pairs=2,
    )
    unchanged = serving.choose_scenario(serving.parse_args(["prefixes"]))
    assert unchanged == CACHING_SCENARIOS["prefixes"]


def test_every_field_but_the_name_has_an_option():
    for scenario in CACHING_SCENARIOS.values():
        names = {field.name for field in fields(scenario)}
        assert names - {"name", "policies"} <= set(serving.OPTIONS)
