"""Computes the cost of an answer in KV tokens from lengths and event positions."""

from collections.abc import Sequence

import numpy as np

from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import FULL, options_of, split
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.events import Footprint, positions_up_to
from vllm_kvpolicy.policies.catalogue.names import parse

NO_QUERIES = 0  # as a group size: what policies borrow for queries is left out


def cost_of(
    line: Line, settings: Line, length: int | None = None
) -> tuple[int, int] | None:
    """Return the cost of one answer.

    Args:
        line: line of an output file.
        settings: settings of that file.
        length: tokens after which the answer is cut off; None for its full length.

    Returns:
        KV tokens read in decoding, summed over its steps, and the most KV tokens that
        its blocks have room for at once; None if the cost depends on the text. What
        a policy borrows for queries is not counted: it depends on the model's heads.
    """
    output = min(line["output_tokens"], length or line["output_tokens"])
    block = settings["block_size"]
    size = (line["prompt_tokens"], output)
    if line["policy"] == FULL:
        return full_cost(*size, block)
    policy, variant = split(line["policy"])
    config = KVPolicyConfig.from_dict(
        {
            "policy": policy,
            "budget": line["budget"],
            "interval": line["interval"],
            "protect_prompt": False if settings["evict_prompts"] else None,
            "policy_config": options_of((policy,), variant, settings),
            "spread_events": False,  # as in `servers`
        }
    )
    if depends_on_text(config):
        return None
    footprint = config.footprint(line["prompt_tokens"], block, NO_QUERIES)
    return bounded_cost(*size, footprint)


def depends_on_text(config: KVPolicyConfig) -> bool:
    """Return whether a policy has no budget or may hold or read less than it."""
    info, options = parse(config.policy), config.options_of(config.policy)
    is_chosen = info.admission is not None or info.selection is not None
    return is_chosen or options.get("hard_mode") == "dynamic"


def full_cost(prompt: int, output: int, block: int) -> tuple[int, int]:
    """Return the cost without a policy; see `cost_of`.

    The token that is fed at position p reads p + 1 tokens. The first output token comes
    from the prompt's last step, and the last one is never fed: a prompt of 3 and an
    output of 3 tokens read 4 + 5 = 9.

    Args:
        prompt: tokens of the prompt.
        output: tokens of the answer.
        block: tokens per block.
    """
    last = prompt + output - 1
    read = (prompt + 1 + last) * (output - 1) // 2
    return read, -(-last // block) * block


def bounded_cost(prompt: int, output: int, footprint: Footprint) -> tuple[int, int]:
    """Return the cost under a policy; see `cost_of` and `full_cost`."""
    last, block = prompt + output - 1, footprint.block_size
    events = positions_up_to(footprint.events, last)
    dropped = [
        (footprint.frontier_blocks(event) - footprint.global_blocks(event)) * block
        for event in events
    ]
    fed = np.arange(prompt, last)
    latest = np.searchsorted(np.asarray(events, int), fed, side="right")
    read = int((fed + 1 - np.array([0, *dropped])[latest]).sum())
    return read, footprint.peak_blocks(last) * block


def mean_costs(
    costs: Sequence[tuple[int, int] | None], count: int
) -> dict[str, float | None]:
    """Return both costs divided by a count; None if one is unknown."""
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return {"kv_read": None, "kv_peak": None}
    read, peak = (sum(some) / count for some in zip(*known, strict=True))
    return {"kv_read": read, "kv_peak": peak}
