"""Names the columns of a serving comparison: their series and how they are printed."""

COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "steps": "vllm:iteration_tokens_total_count",
    "queried_tokens": "vllm:prefix_cache_queries_total",
    "hit_tokens": "vllm:prefix_cache_hits_total",
    "events": "kvpolicy_events_total",
    "blocks_returned": "kvpolicy_blocks_returned_total",
    "tokens_kept": "kvpolicy_tokens_kept_total",
    "tokens_dropped": "kvpolicy_tokens_dropped_total",
    "event_seconds": "kvpolicy_event_seconds_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
"""Column -> series whose growth in a round it shows."""
SERVER_MEANS_MS = {
    "server_ttft_ms": "vllm:time_to_first_token_seconds",
    "server_itl_ms": "vllm:inter_token_latency_seconds",
}
"""Column -> histogram whose mean over a round it shows, in milliseconds."""
RATIO_COLUMNS = ("output_tok_s", "steps", "ttft_ms", "tpot_ms", "itl_p99_ms")
TABLE_COLUMNS = {
    "output_tok_s": ".1f",
    "ttft_ms": ".1f",
    "tpot_ms": ".2f",
    "itl_p50_ms": ".2f",
    "itl_p99_ms": ".2f",
    "server_itl_ms": ".2f",
    "peak_running": ".0f",
    "preemptions": ".0f",
    "steps": ".0f",
    "events": ".0f",
    "blocks_returned": ".0f",
    "kept_ratio": ".3f",
    "peak_kv_usage": ".2f",
}
"""Column -> how its median over the rounds is printed."""

PREFIX_TTFT = ("ttft_ms", "ttft_p99_ms")
TURN_TTFT = ("ttft_first_ms", "ttft_first_p99_ms", "ttft_later_ms", "ttft_later_p99_ms")
_LOAD_COLUMNS = {
    "tpot_ms": ".2f",
    "itl_p99_ms": ".2f",
    "peak_running": ".0f",
    "preemptions": ".0f",
    "steps": ".0f",
    "events": ".0f",
    "blocks_returned": ".0f",
    "peak_kv_usage": ".2f",
}

SCARCE_COLUMNS = {
    "output_tok_s": ".1f",
    "preemptions": ".0f",
    "itl_p50_ms": ".2f",
    "itl_p99_ms": ".2f",
    "ttft_ms": ".1f",
    "peak_running": ".0f",
    "mean_running": ".1f",
    "blocks": ".0f",
    "pool_tokens": ".0f",
    "events": ".0f",
    "steps": ".0f",
}
SCARCE_RATIOS = ("output_tok_s", "itl_p50_ms", "itl_p99_ms", "ttft_ms")

SPECULATION_COLUMNS = {
    "output_tok_s": ".1f",
    "drafted": ".0f",
    "accepted_ratio": ".3f",
    "ttft_ms": ".1f",
    "mean_running": ".1f",
    **_LOAD_COLUMNS,
}
SPECULATION_RATIOS = ("output_tok_s", "accepted_ratio", "steps", "tpot_ms", "ttft_ms")


def caching_columns(first_token: tuple[str, ...]) -> dict[str, str]:
    """Return the columns of a scenario in which prompts begin alike.

    Args:
        first_token: its columns of the time to the first token.
    """
    hits = {"output_tok_s": ".1f", "hit_tokens": ".0f", "hit_ratio": ".3f"}
    return {**hits, **dict.fromkeys(first_token, ".1f"), **_LOAD_COLUMNS}


def caching_ratios(first_token: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of such a scenario that are compared; see above."""
    return ("output_tok_s", *first_token, "tpot_ms", "itl_p99_ms")
