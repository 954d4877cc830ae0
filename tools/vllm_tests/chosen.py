"""The files of vLLM's tests that run.

Left out is what needs a GPU (in tests/v1: engine/test_engine_core, test_async_llm,
test_engine_core_client, test_abort_final_step and most of e2e), what needs the weights
of a real model (the rest of e2e, most of tests/entrypoints: prompts, templates and
vocabularies of models, adapters), what configures a scheduler with mocks in the place
of numbers, of which nothing of ours can be built
(streaming_input/test_scheduler_streaming), what wants a drafter's configuration
(spec_decode/test_dflash_lookahead), and what builds no object of ours (the rest of
engine and core). Of what says nothing here because stock vLLM fails it, too, these are
left out as well: engine/test_preprocess_error_handling patches a process that only
`fork` makes like its parent, and a CPU spawns; an engine of core/test_scheduler_e2e
does not start on a CPU; test_engine_metrics (LEFT_OUT) wants a model that never ends an
answer. The rest of LEFT_OUT starts two servers to ask them nothing of a model.
"""

CONFIGURATIONS, ENGINES, SERVERS = "configurations", "engines", "servers"
GROUPS = {
    CONFIGURATIONS: (
        "tests/v1/core/test_async_scheduler.py",
        "tests/v1/core/test_deferred_block_free.py",
        "tests/v1/core/test_prefix_caching.py",
        "tests/v1/core/test_prefix_replay.py",
        "tests/v1/core/test_priority_preemption_bug.py",
        "tests/v1/core/test_priority_scheduler_random.py",
        "tests/v1/core/test_scheduler.py",
        "tests/v1/core/test_single_type_kv_cache_manager.py",
        "tests/v1/core/test_swa_inflight_window_free.py",
        "tests/v1/core/test_worker_slot_overflow.py",
        "tests/v1/core/prefix_cache/test_partial_prefix_cache_hits.py",
        "tests/v1/spec_decode/test_dynamic_sd.py",
    ),
    ENGINES: (
        "tests/v1/core/test_reset_prefix_cache_e2e.py",
        "tests/v1/engine/test_llm_engine.py",
        "tests/entrypoints/llm/test_chat.py",
        "tests/entrypoints/llm/test_generate.py",
        "tests/v1/sample/test_sampling_params_e2e.py",
    ),
    SERVERS: (
        "tests/entrypoints/openai/chat_completion/test_batched_chat_completions.py",
        "tests/entrypoints/openai/chat_completion/test_chat.py",
        "tests/entrypoints/openai/completion/test_completion.py",
        "tests/entrypoints/serve/instrumentator/test_basic.py",
    ),
}
"""Of schedulers and block managers, where models are configurations without weights; of
whole engines in the process of the tests, and of servers, where every model is the
packaged one."""
_BASIC = "tests/entrypoints/serve/instrumentator/test_basic.py"
LEFT_OUT = (
    "tests/v1/engine/test_llm_engine.py::test_engine_metrics",
    f"{_BASIC}::test_show_version",
    f"{_BASIC}::test_check_health",
    f"{_BASIC}::test_request_wrong_content_type",
)
