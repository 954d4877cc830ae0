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
FORMS = {
    ".0f": (
        *("peak_running", "preemptions", "steps", "events", "blocks_returned"),
        *("hit_tokens", "drafted", "blocks", "pool_tokens"),
    ),
    ".1f": ("output_tok_s", "mean_running"),
    ".2f": ("tpot_ms", "itl_p50_ms", "itl_p99_ms", "server_itl_ms", "peak_kv_usage"),
    ".3f": ("kept_ratio", "hit_ratio", "accepted_ratio"),
}
"""How columns are printed; all others are times to the first token."""


def printed(*columns: str) -> dict[str, str]:
    """Return column -> how its median over the rounds is printed."""
    forms = {name: form for form, names in FORMS.items() for name in names}
    return {column: forms.get(column, ".1f") for column in columns}


RATIO_COLUMNS = ("output_tok_s", "steps", "ttft_ms", "tpot_ms", "itl_p99_ms")
TABLE_COLUMNS = printed(
    *("output_tok_s", "ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms"),
    *("server_itl_ms", "peak_running", "preemptions", "steps", "events"),
    *("blocks_returned", "kept_ratio", "peak_kv_usage"),
)

PREFIX_TTFT = ("ttft_ms", "ttft_p99_ms")
TURN_TTFT = ("ttft_first_ms", "ttft_first_p99_ms", "ttft_later_ms", "ttft_later_p99_ms")
_LOAD_COLUMNS = (
    *("tpot_ms", "itl_p99_ms", "peak_running", "preemptions", "steps", "events"),
    *("blocks_returned", "peak_kv_usage"),
)

SCARCE_COLUMNS = printed(
    *("output_tok_s", "preemptions", "itl_p50_ms", "itl_p99_ms", "ttft_ms"),
    *("peak_running", "mean_running", "blocks", "pool_tokens", "events", "steps"),
)
SCARCE_RATIOS = ("output_tok_s", "itl_p50_ms", "itl_p99_ms", "ttft_ms")

SPECULATION_COLUMNS = printed(
    *("output_tok_s", "drafted", "accepted_ratio", "ttft_ms", "mean_running"),
    *_LOAD_COLUMNS,
)
SPECULATION_RATIOS = ("output_tok_s", "accepted_ratio", "steps", "tpot_ms", "ttft_ms")


def caching_columns(first_token: tuple[str, ...]) -> dict[str, str]:
    """Return the columns of a scenario in which prompts begin alike.

    Args:
        first_token: its columns of the time to the first token.
    """
    hits = ("output_tok_s", "hit_tokens", "hit_ratio")
    return printed(*hits, *first_token, *_LOAD_COLUMNS)


def caching_ratios(first_token: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of such a scenario that are compared; see above."""
    return ("output_tok_s", *first_token, "tpot_ms", "itl_p99_ms")
