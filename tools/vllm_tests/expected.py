"""What differs from stock vLLM when its tests build our classes, and why."""

from tools.vllm_tests.compare import Expected

CHATS = "tests/entrypoints/openai/chat_completion"
BATCHED = f"{CHATS}/test_batched_chat_completions.py"
CHAT = f"{CHATS}/test_chat.py"
COMPLETION = "tests/entrypoints/openai/completion/test_completion.py"
EXPECTED = (
    Expected(
        "The test wants another tokenizer, or answers that another model gives",
        ("stock",),
        (
            "tests/entrypoints/llm/test_chat.py::test_chat_extra_kwargs[True]",
            "tests/entrypoints/llm/test_generate.py::test_max_model_len",
            f"{BATCHED}::test_batched_chat_completions_logprob_token_ids",
            f"{BATCHED}::test_batched_harmony_response_format_uses_structural_tag",
            f"{BATCHED}::test_batched_reasoning_wiring_matches_single_chat",
            f"{CHAT}::test_complex_message_content",
            f"{CHAT}::test_more_than_one_prompt_logprobs_chat",
            f"{CHAT}::test_response_format_json_object",
            f"{CHAT}::test_response_format_json_schema",
            f"{CHAT}::test_single_chat_session",
            f"{CHAT}::test_structured_outputs_json_chat",
            f"{COMPLETION}::test_logprob_token_ids",
            f"{COMPLETION}::test_logprob_token_ids_stream",
            f"{COMPLETION}::test_single_completion",
            "sample/test_sampling_params_e2e.py::test_allowed_token_ids",
            "sample/test_sampling_params_e2e.py::test_stop",
        ),
    ),
    Expected(
        "A request enters when the forecast bears it until its end; vLLM lets it in "
        "when its prompt fits, and preempts later",
        ("never", "small"),
        (
            "core/test_async_scheduler.py"
            "::test_kv_pressure_preemption_with_inflight_output",
            "core/test_deferred_block_free.py"
            "::test_cow_retentions_deferred_until_copy_step_processed",
            "core/test_priority_preemption_bug.py"
            "::test_priority_scheduler_preempt_skipped_request",
            "core/test_scheduler.py::test_preempt_during_execution",
        ),
    ),
    Expected(
        "Prompts have events: behind the first nothing is offered to the prefix cache, "
        "and their rows hold other superblocks",
        ("small", "identity"),
        (
            "core/test_async_scheduler.py::test_prefix_caching_for_multi_turn",
            "core/test_prefix_replay.py::test_hit_replays_window_without_reallocating",
        ),
    ),
    Expected(
        "Requests that have had events hold less, and the pool is never full",
        ("small",),
        (
            "core/test_scheduler.py"
            "::test_priority_scheduling_ec_connector_preemption_and_resumption",
        ),
    ),
    Expected(
        "The test takes superblocks by hand, so that nobody known holds them",
        ("identity",),
        (
            "core/test_deferred_block_free.py"
            "::test_cow_retentions_deferred_until_copy_step_processed",
        ),
    ),
    Expected(
        "KV connectors and KV offloading",
        ("never", "small"),
        (
            "core/test_scheduler.py::test_async_load_reservation_prevents_wedge_e2e",
            "core/test_scheduler.py::test_kv_connector_handles_preemption",
        ),
        refused=True,
    ),
    Expected(
        "KV connectors and KV offloading",
        ("small",),
        ("core/test_scheduler.py::test_kv_connector_basic",),
        refused=True,
    ),
)
