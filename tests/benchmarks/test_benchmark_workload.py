"""Tests of requests, pools and the servers of a scenario."""

from dataclasses import replace

import pytest

from benchmarks.scenarios import AMPLE_SHARE, SCENARIOS
from benchmarks.workload import (
    Workload,
    block_bytes,
    blocks_needed,
    draw_lengths,
    ordinary_token_ids,
    pool_blocks,
)


@pytest.mark.parametrize(
    "prompts, output, block, blocks",
    [
        ([40], 1000, 32, 33),  # 1039 tokens with a place in the cache
        ([25], 1000, 32, 32),  # exactly full
        ([26], 1000, 32, 33),  # one token in a block of its own
        ([25, 26], 1000, 32, 65),
        ([1], 1, 16, 1),
    ],
)
def test_blocks_needed(prompts, output, block, blocks):
    assert blocks_needed(prompts, output, block) == blocks


def test_half_a_pool_has_the_null_block_on_top():
    assert pool_blocks([25, 25], 1000, 32, share=0.5) == 32 + 1
    assert pool_blocks([25, 26], 1000, 32, share=0.5) == 32 + 1
    assert pool_blocks([25, 26], 1000, 32, share=2.0) == 130 + 1


def test_block_bytes(tiny_model):
    # Keys and values, 2 layers, 2 KV heads of size 32, 4 bytes each.
    assert block_bytes(tiny_model, 16) == 2 * 2 * 2 * 32 * 16 * 4
    assert block_bytes(tiny_model, 16, "bfloat16") == 2 * 2 * 2 * 32 * 16 * 2


def test_ordinary_tokens_are_not_special(tiny_model):
    assert ordinary_token_ids(tiny_model) == tuple(range(3, 3 + 96))


def test_rounds_share_lengths_but_not_contents():
    workload = Workload(tuple(range(5, 50)), (40, 300), 10, seed=1)
    first, second = workload.prompts(1), workload.prompts(2)
    assert [len(prompt) for prompt in first + second] == [40, 300, 40, 300]
    assert first == workload.prompts(1)
    assert first != second
    assert first != replace(workload, seed=2).prompts(1)
    assert set(first[1]) <= set(workload.token_ids)


def test_lengths_are_seeded_and_in_range():
    lengths = draw_lengths(1000, 40, 300, seed=0)
    assert (min(lengths), max(lengths)) == (40, 300)
    assert lengths == draw_lengths(1000, 40, 300, seed=0)
    assert lengths != draw_lengths(1000, 40, 300, seed=1)


def value_of(words: list[str], flag: str) -> str:
    """Return the word after a flag."""
    return words[words.index(flag) + 1]


def test_servers_under_pressure(tiny_model):
    scenario = SCENARIOS["pressure"]
    workload = scenario.workload(tiny_model)
    servers = scenario.servers(tiny_model, workload)
    assert list(servers) == ["streaming", "ams-tova", "stock", "default", "ample"]
    assert scenario.comparisons[0] == ("ample", "stock")
    assert not scenario.checked_servers(tiny_model, workload)
    needed = blocks_needed(workload.prompt_tokens, 1000, 32)
    for name in ("streaming", "ams-tova", "stock"):
        assert value_of(servers[name], "--block-size") == "32"
        blocks = int(value_of(servers[name], "--num-gpu-blocks-override"))
        assert blocks == needed // 2 + 1
    assert value_of(servers["ams-tova"], "--kv-policy") == "ams-tova"
    assert value_of(servers["ams-tova"], "--kv-budget") == "128"
    assert value_of(servers["ams-tova"], "--kv-interval") == "64"
    for name in ("streaming", "ams-tova", "stock"):
        assert "--no-enable-prefix-caching" in servers[name]
    assert "--no-enable-prefix-caching" not in servers["default"]
    for name in ("stock", "default"):
        assert not any(word.startswith("--kv-policy") for word in servers[name])
    ample = servers.pop("ample")
    sizes = {value_of(words, "--kv-cache-memory-bytes") for words in servers.values()}
    assert sizes == {str(blocks * block_bytes(tiny_model, 32))}
    for flag in ("--block-size", "--num-gpu-blocks-override"):
        assert flag not in servers["default"]
    blocks = int(value_of(ample, "--num-gpu-blocks-override"))
    assert blocks == needed * AMPLE_SHARE + 1


def test_neutral_servers_never_reach_their_budget(tiny_model):
    scenario = SCENARIOS["neutral"]
    servers = scenario.servers(tiny_model, scenario.workload(tiny_model))
    budget = int(value_of(servers["ams-tova"], "--kv-budget"))
    assert budget >= int(value_of(servers["ams-tova"], "--max-model-len"))
    assert not scenario.is_pressed
    assert scenario.pairs >= 9


def test_what_cannot_be_served_is_refused_before_any_server_starts(tiny_model):
    scenario = replace(SCENARIOS["pressure"], max_model_len=1100)
    with pytest.raises(ValueError, match="got 1100, expected at least 12"):
        scenario.workload(tiny_model)
    scenario = replace(SCENARIOS["pressure"], requests=2)
    with pytest.raises(ValueError, match="2048 tokens take 64 blocks, the pool has"):
        scenario.servers(tiny_model, scenario.workload(tiny_model))
