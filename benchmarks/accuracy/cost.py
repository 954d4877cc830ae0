"""Computes the cost of an answer in KV tokens from lengths and events.

Where events happen follows from lengths. So does what they drop, unless the text
decides: then the server says it, see `report_events` in docs/flags.md.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import FULL, options_of, split
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.events import Footprint

FROM_LENGTHS, FROM_SERVER = "lengths", "server"

Dropped = Sequence[tuple[int, float]]
"""Position of each event, and the tokens per KV head that are dropped after it."""


def cost_of(
    line: Line, settings: Line, length: int | None = None
) -> tuple[float, int] | None:
    """Return the cost of one answer.

    Args:
        length: tokens after which the answer is cut off; None for its full length.

    Returns:
        KV tokens read in decoding, summed over its steps; and the most KV tokens that
        its blocks have room for at once, those that it borrows for queries included.
        Per KV head, mean over layers and heads. None if that depends on the text and
        the line does not say it. Queries are left out where the model is not known.
    """
    output = min(line["output_tokens"], length or line["output_tokens"])
    block, prompt = settings["block_size"], line["prompt_tokens"]
    if line["policy"] == FULL:
        return full_cost(prompt, output, block)
    config = _config_of(line, settings)
    if cost_from(line, settings) is None:
        return None
    group = settings["group_size"] or 0
    footprint = config.footprint(prompt, block, group)
    selected = config.resolved().options.get("quest_budget")
    return bounded_cost(prompt, output, footprint, line.get("dropped"), selected)


def cost_from(line: Line, settings: Line) -> str | None:
    """Return what an answer's cost follows from.

    FROM_SERVER where the server said what events dropped; FROM_LENGTHS where it did
    not, and arithmetic knows; None where neither is so.
    """
    if line["policy"] != FULL and line.get("dropped") is not None:
        return FROM_SERVER
    if line["policy"] == FULL or not depends_on_text(_config_of(line, settings)):
        return FROM_LENGTHS
    return None


def _config_of(line: Line, settings: Line) -> KVPolicyConfig:
    policy, variant = split(line["policy"])
    keeps = settings["keep_prompts"]
    return KVPolicyConfig.from_dict(
        {
            "policy": policy,
            "budget": line["budget"],
            "interval": line["interval"],
            "pin": "prompt" if keeps else "none" if settings["evict_prompts"] else None,
            "policy_config": options_of((policy,), variant, settings),
            "spread_events": False,  # as in `servers`
        }
    )


def depends_on_text(config: KVPolicyConfig) -> bool:
    """Return whether the text decides how much a policy holds."""
    policy = config.resolved()
    words = policy.info.parts
    is_dynamic = policy.options.get("hard_mode") == "dynamic"
    return bool(policy.info.admission or is_dynamic or any(w.dynamic for w in words))


def full_cost(prompt: int, output: int, block: int) -> tuple[int, int]:
    """Return the cost without a policy; see `cost_of`.

    The token that is fed at position p reads p + 1 tokens. The first output token comes
    from the prompt's last step, and the last one is never fed: a prompt of 3 and an
    output of 3 tokens read 4 + 5 = 9.
    """
    last = prompt + output - 1
    read = (prompt + 1 + last) * (output - 1) // 2
    return read, -(-last // block) * block


def bounded_cost(
    prompt: int,
    output: int,
    footprint: Footprint,
    dropped: Dropped | None = None,
    selected: int | None = None,
) -> tuple[float, int]:
    """Return the cost under a policy; see `cost_of` and `full_cost`.

    Args:
        dropped: by its events; None for what the footprint says.
        selected: tokens that a step reads where a selection chooses pages, local ones
            included; None where it reads all. Where heads hold different numbers of
            tokens, what they read is at most what is counted here: the mean over heads
            of the smaller number is not above the smaller one of the means.
    """
    last = prompt + output - 1
    if dropped is None:
        dropped = _planned(footprint, last)
    dropped = [(event, tokens) for event, tokens in dropped if event < last]
    fed = np.arange(prompt, last)
    latest = np.searchsorted([event for event, _ in dropped], fed, side="right")
    gone = np.array([0.0, *(tokens for _, tokens in dropped)])[latest]
    reads = fed + 1 - gone
    if selected is not None:
        block = footprint.block_size
        frontiers = [footprint.frontier_blocks(event) * block for event, _ in dropped]
        frontier = np.array([0, *frontiers])[latest]
        local = fed + 1 - frontier
        pages = -(-np.maximum(selected - local, 0) // block)
        reads = local + np.minimum(frontier - gone, pages * block)
    return float(reads.sum()), _peak(last, footprint, dropped)


def _planned(footprint: Footprint, last: int) -> Dropped:
    """Return what events drop where they fill the blocks that they may keep."""
    block = footprint.block_size
    return [
        (
            event,
            (footprint.frontier_blocks(event) - footprint.global_blocks(event)) * block,
        )
        for event in footprint.events.positions_up_to(last)
    ]


def _peak(last: int, footprint: Footprint, dropped: Dropped) -> int:
    """Return the most tokens that blocks have room for on the way to `last` tokens.

    What `Footprint.peak_blocks` computes, for events that dropped other amounts. A
    block is held until it is empty in all layers and heads.
    """
    block, window = footprint.block_size, footprint.window_blocks
    peak = gone = 0
    for event, tokens in dropped:
        peak = max(peak, -(-event // block) - gone + window)
        gone = int(tokens // block)
    after = dropped[-1][0] + 1 if dropped else 0
    coming = footprint.events.next_event(after)
    is_open = last > coming - footprint.window_tokens
    return block * max(peak, -(-last // block) - gone + window * is_open)


def mean_costs(
    costs: Sequence[tuple[float, float] | None], count: int
) -> dict[str, float | None]:
    """Return both costs divided by a count; None if one is unknown."""
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return {"kv_read": None, "kv_peak": None}
    read, peak = (sum(some) / count for some in zip(*known, strict=True))
    return {"kv_read": read, "kv_peak": peak}
