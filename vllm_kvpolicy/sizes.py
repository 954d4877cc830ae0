"""Sizes of an engine with a policy, from its configuration alone.

Scheduler, worker and start-up line use the same formulas.
"""

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import LEAST_AUTO, NONE, PRESSURE
from vllm_kvpolicy.config_values import own_config
from vllm_kvpolicy.events import LAST_PHASE, Footprint

AUTO_STEP = 64  # tokens, of which a budget of AUTO is a multiple


@dataclass(frozen=True)
class PlannerLimits:
    """Of an engine: N, tokens per superblock, and the events that a step may carry."""

    block_size: int
    events_per_step: int


@dataclass(frozen=True)
class OtherGroups:
    """What layers with a sliding window, or with a state, hold beside full attention.

    vLLM cuts the layers of each kind into groups of equal size, which take superblocks
    of the same pool, each for itself: groups of the rarer kind's layers, or of the
    other kind's where those are less than half as many again.

    Layers with a state (Mamba, gated delta nets, short convolutions) keep one
    superblock for the newest token. Where the prefix cache saves states (`align`),
    they keep the one before it as well, until the copy has been made, and none of those
    that a prompt skips.

    Example: 10 layers of full attention and 52 with a window of 1,024 tokens make one
    group and six, of 10 layers each. With N = 16 and one token a step, a request holds
    up to 65 superblocks in each of the six; of layers with a state, 1 or 2.

    Args:
        window: tokens that such a layer attends to, the newest included; 2 for a
            state, which follows from the one before it.
        num_full: layers of full attention.
        num_others: layers with a window or a state, 0 for none.
        block_size: tokens per superblock in these groups, see `own_block_size`.
        step_tokens: most tokens that a step computes.
        late_steps: steps for which tokens count as not computed yet.
        most_each: most superblocks that a request has in a group; None for as many as
            the window takes.
    """

    window: int
    num_full: int
    num_others: int
    block_size: int
    step_tokens: int
    late_steps: int
    most_each: int | None = None

    @property
    def layers_per_group(self) -> int:
        """Layers of the largest group, whose pages a superblock has room for."""
        few, many = sorted((self.num_full, self.num_others))
        return (many if not few or 2 * many < 3 * few else few) or 1

    @property
    def num_full_groups(self) -> int:
        """Groups of full attention; a policy needs one."""
        return -(-self.num_full // self.layers_per_group)

    @cached_property
    def count(self) -> int:
        """Groups beside that of full attention."""
        return -(-self.num_others // self.layers_per_group)

    def held(self, computed: Any, end: Any, step: int = 1) -> Any:
        """Return superblocks held in a step that gets from `computed` to `end` tokens.

        Both are integers or arrays. See `first_block`.
        """
        each = -(-end // self.block_size) - self.first_block(computed, step)
        if self.most_each is not None:
            each = each - (each - self.most_each) * (each > self.most_each)
        return self.count * each

    def first_block(self, computed: Any, step: int = 1) -> Any:
        """Return the first superblock, counted from 0, that has not been given back.

        Args:
            computed: tokens for which older ones have been; an integer or an array.
            step: most tokens that an earlier step computed.
        """
        first = computed - self.late_steps * step - self.window + 1
        return first * (first > 0) // self.block_size

    def most_blocks(self, num_tokens: int, step: int | None = None) -> int:
        """Return the most superblocks that a request of `num_tokens` ever holds.

        Args:
            step: most tokens that it computes in a step; None for what any step may.
        """
        step = self.step_tokens if step is None else step
        reach = self.window + (self.late_steps + 1) * step
        each = min(-(-num_tokens // self.block_size), -(-reach // self.block_size) + 1)
        return self.count * min(each, self.most_each or each)

    @property
    def mean_blocks(self) -> float:
        """Superblocks that a long request holds on the average, at a token a step."""
        each = 1 + (self.window + self.late_steps - 1) / self.block_size
        return self.count * min(each, self.most_each or each)


FULL, SLIDING, STATE = "full_attention", "sliding_attention", "state"
# What models name their layers, where that is another word than ours. Some layers
# attend and have a state, and some do neither.
KINDS: dict[Any, tuple[str, ...]] = {
    0: (FULL,),
    1: (SLIDING,),
    "attention": (FULL,),
    "hybrid": (FULL, STATE),
    "linear_attention": (STATE,),
    "mamba": (STATE,),
    "conv": (STATE,),
    "mlp": (),
    "moe": (),
}
# Of layers with a window (MiMo-V2), and what vLLM names that of a layer.
WINDOW_FIELDS = {
    "swa_num_attention_heads": "total_num_attention_heads",
    "swa_num_key_value_heads": "total_num_kv_heads",
    "swa_head_dim": "head_size",
}


def _kinds_by_layer(vllm_config: Any) -> list[tuple[str, ...]]:
    """Return the kinds of cache of each layer that the model names, in order.

    Where it has no window, as with `--disable-sliding-window`, vLLM makes full
    attention of layers that would have one. The last layers may read the keys and
    values of others (`num_kv_shared_layers`) and have no cache. MiMo-V2 numbers kinds.
    """
    text = vllm_config.model_config.hf_text_config
    fields = ("hybrid_layer_pattern", "layer_types", "layers_block_type")
    named = next(filter(None, (getattr(text, each, None) for each in fields)), ())
    kinds = [KINDS.get(name, (name,)) for name in named]
    if not getattr(text, "sliding_window", None):
        kinds = [(FULL,) if each == (SLIDING,) else each for each in kinds]
    return kinds[: len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)]


def layer_kinds(vllm_config: Any) -> list[str]:
    """Return the kinds of cache of the model's layers, or the model's names of such."""
    return [kind for kinds in _kinds_by_layer(vllm_config) for kind in kinds]


def shapes(vllm_config: Any, kind: str = FULL) -> list[Any]:
    """Return vLLM's ModelArchitectureConfig of each layer of a kind, in order.

    It has the layer's heads and their size. Of a model that does not name layers of
    full attention, one stands for these.
    """
    whole = vllm_config.model_config.model_arch_config
    by_layer = enumerate(_kinds_by_layer(vllm_config))
    found = [whole[index] for index, kinds in by_layer if kind in kinds]
    if kind == SLIDING:
        found = [_of_window(each, vllm_config) for each in found]
    return found or [whole] * (kind == FULL)


def _of_window(shape: Any, vllm_config: Any) -> Any:
    """Return the shape of a layer with a window, which may have fields of its own."""
    text, own = vllm_config.model_config.hf_text_config, copy(shape)
    for field, name in WINDOW_FIELDS.items():
        setattr(own, name, getattr(text, field, None) or getattr(shape, name))
    return own


def has_other_values(vllm_config: Any) -> bool:
    """Return whether values of a MiMo-V2 have another size than keys."""
    text = vllm_config.model_config.hf_text_config
    if not str(getattr(text, "model_type", None)).startswith("mimo_v2"):
        return False
    sizes = [
        [getattr(text, kind + name, None) for name in ("v_head_dim", "head_dim")]
        for kind in ("", "swa_")
    ]
    return any(values not in (None, keys) for values, keys in sizes)


def own_shape(vllm_config: Any) -> Any:
    """Return vLLM's ModelArchitectureConfig of the layers that a policy bounds."""
    return shapes(vllm_config)[0]


def kv_heads(vllm_config: Any, kind: str = FULL) -> tuple[int, int]:
    """Return (H, D): KV heads of a layer of a kind on one rank, and their channels.

    Of full attention where the model has no layer of that kind. With MLA that is one
    head, whose keys are latent vectors of D channels.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    shape, *_ = shapes(vllm_config, kind) or shapes(vllm_config)
    return model.get_num_kv_heads(parallel, shape), shape.head_size


def total_kv_heads(vllm_config: Any) -> int:
    """Return the KV heads of a layer that a policy bounds, on all ranks together."""
    if vllm_config.model_config.use_mla:
        return 1
    return int(own_shape(vllm_config).total_num_kv_heads)


def row_sizes(vllm_config: Any) -> tuple[int, int]:
    """Return a token's channels on a rank, in a full layer and in one with a window."""
    own, windowed = (prod(kv_heads(vllm_config, kind)) for kind in (FULL, SLIDING))
    return own or 1, windowed or 1  # of a model without attention


def own_block_size(vllm_config: Any) -> int:
    """Return N, tokens per superblock of the layers that a policy bounds.

    Superblocks of all groups have one size in bytes. Where layers with a window have
    larger heads, or more of them, vLLM has the others take more tokens, as many times
    as many (Gemma 4); `--block-size` is the smaller number.

    Example: 4 KV heads of 512 channels, and 16 of 256 with a window. With
    `--block-size 16`, N is 32, and 16 for windows.
    """
    own, windowed = row_sizes(vllm_config)
    return int(vllm_config.cache_config.block_size) * max(windowed // own, 1)


def other_groups(vllm_config: Any) -> OtherGroups:
    scheduler, kinds = vllm_config.scheduler_config, layer_kinds(vllm_config)
    text, cache = vllm_config.model_config.hf_text_config, vllm_config.cache_config
    late_steps, most_each = int(scheduler.async_scheduling or False), None
    window = getattr(text, "sliding_window", None) or 0
    if STATE in kinds:
        window, most_each = 2, 1
        if cache.mamba_cache_mode == "align":
            most_each = 2 + late_steps + _saved_states(vllm_config, late_steps)
    own, windowed = row_sizes(vllm_config)
    return OtherGroups(
        window=window,
        num_full=kinds.count(FULL),
        num_others=kinds.count(SLIDING) + kinds.count(STATE),
        block_size=cache.block_size * max(own // windowed, 1),
        step_tokens=scheduler.max_num_batched_tokens,
        late_steps=late_steps,
        most_each=most_each,
    )


def full_layers(vllm_config: Any) -> int:
    """Return how many layers of full attention there are, which a policy bounds."""
    others = other_groups(vllm_config)
    every = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    return others.num_full if others.count else every


def _saved_states(vllm_config: Any, late_steps: int) -> int:
    """Return how many states that vLLM saves inside steps a group holds at most.

    Of Mamba2, which does so on GPUs: at the end of a prompt, or in every step where the
    prefix cache keeps more than that.
    """
    if compat.platform_name() == "cpu":
        return 0
    cache = vllm_config.cache_config
    return 1 + late_steps * (cache.prefix_cache_retention_interval != 0)


def check_drafts(config: KVPolicyConfig, vllm_config: Any, prefix: str = "") -> None:
    """Raise ValueError where a step's drafts reach past a request's first event.

    Beside others, vLLM begins a request of which one token is not computed yet with
    drafts of padding, as many as a step may have, and fails where they are cut. What
    the prefix cache gives leaves room for them (`RequestPlan.usable_hit`); a prompt of
    one token has its first event past what is held without one.

    Args:
        config: of the engine or of a request.
        prefix: of the keys that an error names.
    """
    drafts = vllm_config.num_speculative_tokens
    if not drafts:
        return
    size = own_block_size(vllm_config)
    held = config.footprint(1, size, query_rows(vllm_config)).events.budget
    if held >= drafts:
        return
    name, given = "budget", config.budget_tokens
    if config.resolved().info.is_unbounded:
        name, given = "recent", config.recent_tokens
    least = drafts - (held - given)
    raise ValueError(
        f"{prefix}{name}: got {given}, expected at least {least}, because a step "
        f"speculates up to {drafts} tokens"
    )


def planner_limits(vllm_config: Any, config: KVPolicyConfig) -> PlannerLimits:
    """Return the limits of an engine.

    While it generates, a request has an event every I steps, and a prompt of at least
    K + I tokens ends in one. A step carries twice the average that follows for the
    largest batch, and the events of as many prompts as one step can compute, but at
    least 8; requests beyond that wait for a later step.

    Example: with 1024 requests and I = 128 a step has 8 events on average and carries
    at most 16, or 42 if steps compute 16,384 tokens and K = 256.
    """
    scheduler, interval = vllm_config.scheduler_config, config.interval_tokens
    average = -(-2 * scheduler.max_num_seqs // interval)
    block_size = own_block_size(vllm_config)
    first = config.smallest_budget(block_size) + interval
    prompts = scheduler.max_num_batched_tokens // first
    return PlannerLimits(
        block_size=block_size,
        events_per_step=config.events_per_step or max(8, average, prompts),
    )


def query_rows(vllm_config: Any) -> int:
    """Return the rows of a superblock that a query takes; a token takes two.

    One for each query head of a KV head; in an FP8 cache, whose numbers take a byte, as
    many times more as a number of the model takes bytes. Where heads share a latent
    vector (MLA) a row is half of one, and queries are saved as they are before they are
    turned into its space, where they are longer.

    Example: 16 query heads, 4 KV heads: 4 rows, and 8 in an FP8 cache of bfloat16.
    DeepSeek-V3 has 128 heads of 192 channels, and latent vectors of 576: 86 rows.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_heads = model.get_num_attention_heads(parallel, own_shape(vllm_config))
    count, size = kv_heads(vllm_config)
    if model.use_mla:
        text = model.hf_text_config
        channels = text.qk_nope_head_dim + text.qk_rope_head_dim
        return -(-num_heads * channels // (size // 2))
    is_float8 = vllm_config.cache_config.cache_dtype in compat.FLOAT8_CACHES
    return num_heads // count * (model.dtype.itemsize if is_float8 else 1)


def worded_budget(
    vllm_config: Any, config: KVPolicyConfig, num_blocks: int | None
) -> int:
    """Return the number for a budget in words; for a share that of the longest request.

    AUTO is the number at which max_num_seqs requests of max_model_len fit the pool at
    once, each with what it needs beside: an interval's growth, the rest of two
    superblocks, a query window, and what layers with a sliding window or a state hold.

    Example: 16 requests share 2,048 superblocks of 16 tokens, 128 each. Less 4 for a
    window, 1 for rounding and 512 tokens of growth, that is 1,456 tokens, and so 1,408.

    Args:
        num_blocks: superblocks of the pool, vLLM's null block included; None where it
            is not known yet, for the least that it may stand for.

    Returns:
        Tokens per KV head, at most the ceiling. For AUTO a multiple of 64, and at least
        256, the always-kept tokens and a superblock; or max_model_len, where that is
        less or the pool holds all of it.
    """
    size = own_block_size(vllm_config)
    longest = vllm_config.model_config.max_model_len
    most = config.ceiling_tokens or longest
    if share := config.budget_share:
        least = config.least_budget(size)
        return min(max(int(share * longest), least), max(most, least))
    least = -(-max(LEAST_AUTO, config.least_budget(size)) // AUTO_STEP) * AUTO_STEP
    blocks = ((num_blocks or 1) - 1) // vllm_config.scheduler_config.max_num_seqs
    blocks -= other_groups(vllm_config).most_blocks(longest, 1)
    if blocks * size >= longest:
        return max(min(most, longest), min(longest, config.least_budget(size)))
    window = max(each.window_tokens for each in config.all_resolved)
    blocks -= -(-window * query_rows(vllm_config) // (2 * size))
    ahead = vllm_config.num_lookahead_tokens
    fitting = (blocks - 1) * size - config.interval_tokens - ahead
    budget = min(max(fitting // AUTO_STEP * AUTO_STEP, least), longest)
    # Events inside a prompt come late where the budget is large.
    room = (num_blocks or 0) - 1 - other_groups(vllm_config).most_blocks(longest)

    def fits(tokens: int) -> bool:
        return max_blocks_per_request(vllm_config, config.with_budget(tokens)) <= room

    while budget > least and fits(least) and not fits(budget):
        budget -= AUTO_STEP
    return max(min(budget, most), config.least_budget(size))


def settled(vllm_config: Any, num_blocks: int | None = None) -> KVPolicyConfig:
    """Return an engine's policy, with what a budget in words stands for from now on.

    Called where an engine is configured, for the least, with which workers start; then
    with the size of the pool by its scheduler, and of the smallest pool by API
    processes. Workers need no more: events come with budgets.
    """
    config = own_config(vllm_config)
    if config.budget_word is None:
        return config
    tokens = worded_budget(vllm_config, config, num_blocks)
    vllm_config.additional_config.set_budget(tokens)
    return own_config(vllm_config)


def max_global_blocks(vllm_config: Any, config: KVPolicyConfig) -> int:
    """Return the most superblocks of survivors of any request, by any policy."""
    block_size = own_block_size(vllm_config)
    longest = vllm_config.model_config.max_model_len
    may_keep_all = any(each.info.keeps_all for each in config.all_resolved)
    may_keep_all |= config.events == PRESSURE
    if not may_keep_all:  # and the rest of a superblock that is pinned in part
        longest = min(longest, config.budget_tokens + block_size - 1)
    return -(-longest // block_size)


def max_blocks_per_request(
    vllm_config: Any, config: KVPolicyConfig, longest: int | None = None
) -> int:
    """Return the most superblocks that a request with the server's policy may hold.

    What vLLM wants free at start-up. A request that takes more, because it pins tokens
    or asks for another `kv_policy`, is refused where the pool cannot hold it.

    Args:
        longest: most tokens of a request; None for max_model_len.
    """
    unpinned = replace(config, pin=NONE, is_checked=True)
    footprint = footprint_of(vllm_config, unpinned, 1)
    longest = longest or footprint.longest
    if footprint.keeps_all:
        return -(-longest // footprint.block_size) + footprint.window_blocks
    return footprint.worst_blocks(longest)


def footprint_of(
    vllm_config: Any, config: KVPolicyConfig, prompt_tokens: int, phase: int = 0
) -> Footprint:
    sizes = own_block_size(vllm_config), query_rows(vllm_config)
    return replace(
        config.footprint(prompt_tokens, *sizes, phase),
        ahead=vllm_config.num_lookahead_tokens,
        longest=vllm_config.model_config.max_model_len,
    )


def most_blocks(
    vllm_config: Any, config: KVPolicyConfig, prompt_tokens: int, num_tokens: int
) -> int:
    """Return the superblocks that suffice for a request of these lengths.

    Whatever its phase, so that requests of equal lengths get equal answers.

    Args:
        prompt_tokens: >= 1.
        num_tokens: length of prompt and answer.
    """
    footprint = footprint_of(vllm_config, config, prompt_tokens)
    is_spread = config.spread_events
    return (footprint.most_blocks if is_spread else footprint.peak_blocks)(num_tokens)


def capacity_line(vllm_config: Any, config: KVPolicyConfig, num_blocks: int) -> str:
    """Return the start-up line: policy, budget, and what the pool holds with them.

    With called events, what requests hold at their floors is what they hold at most
    where they are cut at fixed positions: calls can make room for somewhat more.
    `num_blocks` are those of the pool, vLLM's null block included.
    """
    block_size = own_block_size(vllm_config)
    max_model_len = vllm_config.model_config.max_model_len
    beside = other_groups(vllm_config).most_blocks(max_model_len, 1)
    counted = min(config.pins, max_model_len) if isinstance(config.pins, int) else 0
    held = most_blocks(vllm_config, config, max(counted, 1), max_model_len) + beside
    whole = -(-max_model_len // block_size) + beside
    info = config.resolved().info
    if info.is_unbounded:
        kept = f"its newest {config.recent_tokens} tokens and all admitted tokens"
        return (
            f"KV policy {config.policy}: no budget, event every "
            f"{config.interval_tokens} tokens; a request holds "
            f"{kept if info.admission else 'all its tokens'}, at most {whole} of "
            f"the pool's {num_blocks - 1} blocks"
        )
    first = min(
        footprint_of(vllm_config, config, tokens, LAST_PHASE).events.next_event(1)
        for tokens in (1, max_model_len)
    )
    if first >= max_model_len:
        advice = "" if config.budget_word else ", lower --kv-budget"
        return (
            f"KV policy {config.policy}: budget {config.budget_tokens} + interval "
            f"{config.interval_tokens} tokens; no request of at most {max_model_len} "
            f"tokens ever drops any{advice}"
        )
    budget = f"{config.budget_tokens} tokens per KV head{' (auto)' * config.is_auto}"
    if config.budget_share:
        budget = f"{config.budget_word} of each request, at most {budget}"
    fit, fit_whole = (num_blocks - 1) // held, (num_blocks - 1) // whole
    pinned = "" if config.pins in (NONE, 0) else f" and what is pinned ({config.pins})"
    pinned = f" with {counted} pinned tokens" if counted else pinned
    if config.events == PRESSURE:
        most = vllm_config.scheduler_config.max_num_seqs
        is_high = fit < most and not config.is_auto
        advice = "; others are preempted or wait: a lower --kv-budget, or `auto`, helps"
        return (
            f"KV policy {config.policy}: events when the pool runs short, none below "
            f"{budget}; "
            f"the pool of {num_blocks - 1} blocks fits {fit_whole} requests of "
            f"{max_model_len} tokens uncut ({whole} blocks each), or {fit} that are "
            f"cut so far ({held} each{pinned}); with "
            f"{most} at once (--max-num-seqs) nobody is ever cut in a pool of "
            f"{most * whole} blocks{advice * is_high}"
        )
    return (
        f"KV policy {config.policy}: budget {budget}, event every "
        f"{config.interval_tokens}; a request that generates "
        f"{max_model_len} tokens holds at most {held} blocks{pinned} instead of "
        f"{whole}, so the pool of {num_blocks - 1} fits {fit} such requests instead of "
        f"{fit_whole}"
    )


def sharing_line(vllm_config: Any, config: KVPolicyConfig) -> str:
    """Return the start-up line about the prefix cache: what is shared, for how long."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "KV policy prefix cache: off, every request computes its whole prompt"
    infos = (each.info for each in config.all_resolved)
    alone = [info.name for info in infos if info.measures_tokens]
    longest = vllm_config.model_config.max_model_len
    first_event = footprint_of(vllm_config, config, longest).events.next_event(1)
    most = min(first_event, longest)
    until = "those before their first event"
    if config.events == PRESSURE:
        most, until = longest, "as far as the pool has room for them uncut"
    own = f"; requests of {', '.join(alone)} fill it but take nothing from it"
    return (
        f"KV policy prefix cache: on, requests share up to {most} prompt tokens, "
        f"{until}; these stay cached after the event until vLLM needs "
        f"the memory{own if alone else ''}"
    )
