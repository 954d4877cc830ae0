"""Sizes of an engine: what one policy needs does not weigh on the others."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import estimate_max_model_len

from vllm_kvpolicy.block_manager.manager import KVPolicySpec
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.sizes import (
    capacity_line,
    max_blocks_per_request,
    max_global_blocks,
    most_blocks,
    planner_limits,
    sharing_line,
    worded_budget,
)

LONGEST, SIZE = 131072, 32
ENGINE = SimpleNamespace(
    cache_config=SimpleNamespace(
        block_size=SIZE, enable_prefix_caching=True, cache_dtype="auto"
    ),
    model_config=SimpleNamespace(
        max_model_len=LONGEST,
        get_num_attention_heads=lambda *_: 32,
        use_mla=False,
        get_num_kv_heads=lambda *_: 8,
        model_arch_config=SimpleNamespace(head_size=128),
        hf_text_config=SimpleNamespace(layer_types=None),
    ),
    scheduler_config=SimpleNamespace(
        max_num_batched_tokens=2048, async_scheduling=False, max_num_seqs=16
    ),
    parallel_config=None,
    num_lookahead_tokens=0,
)
WHOLE = LONGEST // SIZE


def engine_with(**parts: dict[str, object]) -> SimpleNamespace:
    """Return `ENGINE` with some fields of its configurations changed."""
    changed = {
        name: SimpleNamespace(**vars(getattr(ENGINE, name)) | fields)
        for name, fields in parts.items()
    }
    return SimpleNamespace(**vars(ENGINE) | changed)


def test_what_is_pinned_leaves_the_bounds_alone():
    """A request that pins more than the pool can hold is refused when it comes."""
    alone = KVPolicyConfig("tova", events="always")
    pinning = replace(alone, pin="prompt")
    bound = max_blocks_per_request(ENGINE, alone)
    assert max_blocks_per_request(ENGINE, pinning) == bound < WHOLE // 10
    # Tables list what is kept behind the pinned superblocks, and a superblock's rest.
    for config in (alone, pinning):
        assert max_global_blocks(ENGINE, config) == 2048 // SIZE + 1
    assert max_global_blocks(ENGINE, KVPolicyConfig("tova")) == WHOLE


@pytest.mark.parametrize(
    "config",
    [
        KVPolicyConfig("identity"),
        KVPolicyConfig("quest"),
    ],
)
def test_a_server_that_keeps_all_states_the_whole_length(config):
    window_blocks = -(-config.resolved().window_tokens * 4 // (2 * SIZE))
    assert max_blocks_per_request(ENGINE, config) == WHOLE + window_blocks


@pytest.mark.parametrize(
    ("num_blocks", "longest"), [(0, 0), (36, 1152), (195, LONGEST)]
)
def test_vllm_finds_the_longest_request_that_fits(num_blocks, longest):
    """As it does for `--max-model-len auto`; 195 superblocks do for every length."""
    spec = KVPolicySpec(
        block_size=SIZE, num_kv_heads=8, head_size=32, dtype=torch.float32
    )
    engine = engine_with()
    engine.additional_config = {"kv_policy": {"policy": "streaming"}}
    memory = num_blocks * spec.page_size_bytes
    assert estimate_max_model_len(engine, {"layer": spec}, memory) == longest
    assert ENGINE.model_config.max_model_len == LONGEST


def test_a_query_window_counts_as_superblocks_of_the_request():
    """32 queries of 4 query heads per KV head take as much as 64 tokens."""
    bounds = [
        max_blocks_per_request(ENGINE, KVPolicyConfig(name))
        for name in ("keydiff", "snapkv")
    ]
    assert KVPolicyConfig("snapkv").resolved().window_tokens == 32
    assert bounds[1] == bounds[0] + 2


def test_the_line_of_a_selection_or_an_admission_alone_speaks_of_no_budget():
    gates = KVPolicyConfig("wgkv", recent_tokens=64, options={"wgkv_gates": "file"})
    line = capacity_line(ENGINE, gates, 9000)
    assert "wgkv: no budget" in line and "newest 64 tokens" in line
    assert line.endswith("at most 4096 of the pool's 8999 blocks")
    line = capacity_line(ENGINE, KVPolicyConfig("quest"), 9000)
    assert line.startswith("KV policy quest: no budget, event every 512 tokens; ")
    assert line.endswith("all its tokens, at most 4096 of the pool's 8999 blocks")
    both = capacity_line(ENGINE, KVPolicyConfig("snapkv+quest", events="always"), 9000)
    assert "snapkv+quest: budget 2048 tokens per KV head" in both


def test_the_users_word_counts_more_than_the_policys():
    values = {"events": "always", "budget_tokens": 512}
    for config, pinned in (
        (KVPolicyConfig("epikv", **values), 1000),
        (KVPolicyConfig("epikv", pin="none", **values), 0),
        (KVPolicyConfig("tova", pin=100, **values), 100),
    ):
        assert config.pinned_tokens(1000) == pinned
        footprint = config.footprint(1000, SIZE, 1)
        assert footprint.events.budget == 512 + pinned
        assert footprint.pinned == pinned // SIZE
    assert KVPolicyConfig("tova", pin="prompt").pinned_tokens(7) == 7
    assert KVPolicyConfig("tova", pin=100).pinned_tokens(7) == 7


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        (KVPolicyConfig("tova"), LONGEST),
        (KVPolicyConfig("tova", events="always"), 4096),
        (KVPolicyConfig("tova", events="always", budget_tokens=8192), 12288),
        (
            KVPolicyConfig("tova", events="always", prefill_interval_tokens="prompt"),
            LONGEST,
        ),
        (KVPolicyConfig("tova", events="always", pin="prompt"), LONGEST),
    ],
)
def test_the_line_about_the_prefix_cache_says_how_much_is_shared(config, shared):
    line = sharing_line(ENGINE, config)
    assert f"share up to {shared} prompt tokens" in line and "epikv" not in line


def test_the_line_about_the_prefix_cache_names_who_takes_nothing():
    line = sharing_line(ENGINE, KVPolicyConfig("tova", allow=("epikv",)))
    assert line.endswith("requests of epikv fill it but take nothing from it")
    uncached = engine_with(cache_config={"enable_prefix_caching": False})
    assert sharing_line(uncached, KVPolicyConfig("tova")).endswith("its whole prompt")


def test_a_budget_that_nothing_reaches_is_said():
    short = engine_with(model_config={"max_model_len": 2048})
    line = capacity_line(short, KVPolicyConfig("tova", events="always"), 9000)
    assert line.endswith("ever drops any, lower --kv-budget")
    small = KVPolicyConfig("tova", events="always", budget_tokens=1024)
    assert "holds at most" in capacity_line(short, small, 9000)
    # An event inside a prompt comes earlier.
    inside = KVPolicyConfig(
        "tova", events="always", budget_tokens=1800, prefill_interval_tokens=128
    )
    assert "holds at most" in capacity_line(short, inside, 9000)


AUTO = KVPolicyConfig.from_dict(
    {"policy": "tova", "budget": "auto", "events": "pressure"}
)


def test_a_share_of_each_request_is_bounded_by_that_of_the_longest():
    quarter = KVPolicyConfig.from_dict({"policy": "tova", "budget": "25%"})
    assert worded_budget(ENGINE, quarter, None) == LONGEST // 4
    small = replace(quarter, budget_word="0.01%")
    assert worded_budget(ENGINE, small, None) == 4 + 32 + SIZE
    low = replace(quarter, ceiling_tokens=500)
    assert worded_budget(ENGINE, low, None) == 500
    known = quarter.with_budget(LONGEST // 4)
    said = capacity_line(ENGINE, known, 3201)
    assert f"none below 25% of each request, at most {LONGEST // 4} tokens per" in said
    # As many prompts may end in an event as with the least budget.
    wide = engine_with(scheduler_config={"max_num_batched_tokens": 16384})
    assert planner_limits(wide, known).events_per_step == 16384 // (4 + 32 + SIZE + 512)


def test_the_pools_share_by_hand():
    # 200 superblocks each. One is the query window's, one for rounding; 198 of 32
    # tokens, less 512 of growth, are 5,824, a multiple of 64.
    assert worded_budget(ENGINE, AUTO, 16 * 200 + 1) == 5824
    assert worded_budget(ENGINE, AUTO, 16 * 200) == 5760  # vLLM's null block is one
    assert worded_budget(ENGINE, AUTO, 16 * WHOLE) < LONGEST
    assert worded_budget(ENGINE, AUTO, 16 * WHOLE + 1) == LONGEST  # nobody is ever cut
    # Too little for all, or not known yet.
    assert worded_budget(ENGINE, AUTO, 400) == worded_budget(ENGINE, AUTO, None) == 256
    low = replace(AUTO, ceiling_tokens=1000)
    assert worded_budget(ENGINE, low, 16 * 200 + 1) == 1000
    assert worded_budget(ENGINE, low, 16 * WHOLE + 1) == 1000


def test_the_pools_share_leaves_room_for_windows_and_what_is_always_kept():
    wide = replace(AUTO, allow=("snapmax",))  # 256 queries: 16 superblocks, not 1
    assert worded_budget(ENGINE, wide, 16 * 200 + 1) == 5824 - 15 * SIZE - 32
    recent = replace(AUTO, recent_tokens=300)
    assert worded_budget(ENGINE, recent, None) == 384  # 4 + 300 + 32 and up
    recent.with_budget(384).validate_block_size(SIZE)
    short = engine_with(model_config={"max_model_len": 100})
    assert worded_budget(short, AUTO, None) == 100


@pytest.mark.parametrize("share", [60, 61, 97, 250, 1001])
@pytest.mark.parametrize("interval", [64, 100, 512])
@pytest.mark.parametrize("policy", ["tova", "snapkv", "expected"])
def test_as_many_as_may_run_fit_with_the_pools_share(share, interval, policy):
    interval = max(interval, 128 if policy == "expected" else 0)
    config = replace(AUTO, policy=policy, interval_tokens=interval)
    budget = worded_budget(ENGINE, config, 16 * share + 1)
    assert budget % 64 == 0 and budget > 256
    more = config.with_budget(budget + 2 * 64)
    assert most_blocks(ENGINE, config.with_budget(budget), 1, LONGEST) <= share
    assert most_blocks(ENGINE, more, 1, LONGEST) > share


def test_the_pools_share_of_one_leaves_room_for_long_prompts():
    """Their first event is the first multiple of 4,096 tokens above the budget."""
    alone = engine_with(scheduler_config={"max_num_seqs": 1})
    for num_blocks in (300, 400, 600, 900):
        config = AUTO.with_budget(worded_budget(alone, AUTO, num_blocks))
        assert max_blocks_per_request(alone, config) < num_blocks
        assert config.budget_tokens > 256


def test_the_lines_of_events_on_call_say_who_is_cut():
    config = replace(AUTO, budget_word=None).with_budget(1024)
    line = capacity_line(ENGINE, config, 16 * 200 + 1)
    held = most_blocks(ENGINE, config, 1, LONGEST)
    assert "none below 1024 tokens per KV head; the pool of 3200 blocks" in line
    assert f"fits 0 requests of {LONGEST} tokens uncut ({WHOLE} blocks each)" in line
    assert f"or {3200 // held} that are cut so far ({held} each)" in line
    assert line.endswith(
        f"16 at once (--max-num-seqs) nobody is ever cut in a pool of "
        f"{16 * WHOLE} blocks"
    )
    pinned = capacity_line(ENGINE, replace(config, pin="system"), 16 * 200 + 1)
    assert f"({held} each and what is pinned (system)); with 16" in pinned
    fixed = replace(config, events="always", pin=512)
    line = capacity_line(ENGINE, fixed, 16 * 200 + 1)
    held = most_blocks(ENGINE, fixed, 512, LONGEST)
    assert held > most_blocks(ENGINE, fixed, 1, LONGEST)
    assert f"at most {held} blocks with 512 pinned tokens instead of" in line
    high = capacity_line(ENGINE, config.with_budget(8192), 16 * 200 + 1)
    assert high.endswith("or wait: a lower --kv-budget, or `auto`, helps")
    chosen = capacity_line(ENGINE, AUTO.with_budget(5824), 16 * 200 + 1)
    assert "none below 5824 tokens per KV head (auto);" in chosen
    assert "or 16 that are cut so far" in chosen
    assert capacity_line(ENGINE, AUTO.with_budget(LONGEST), 9**9).endswith("drops any")
    assert f"share up to {LONGEST} prompt tokens, as far as" in sharing_line(
        ENGINE, config
    )
