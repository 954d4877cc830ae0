"""Who has to leave an engine, and what it learns of the lengths of answers."""

from pathlib import Path

from support.engine.helpers import Engine, Job, make_prompt, serve

VALUES = {
    "policy": "snapkv",
    "budget": 96,
    "interval": 64,
    "recent": 16,
    "prefill_interval": 64,
}
PEAK = 8  # superblocks: 96 + 64 tokens, one for where they begin, two for the window


def test_requests_without_a_bound_may_still_preempt(tiny_model):
    whole = {"kv_policy": "none"}
    jobs = [
        Job(f"r{n}", make_prompt(n, 50), 200, extra_args=whole if n % 3 == 0 else None)
        for n in range(9)
    ]
    run = serve(tiny_model, VALUES, jobs, num_blocks=5 * PEAK + 1)
    assert run.counters["preemptions_unbounded"] == run.preemptions > 0
    assert run.counters["preemptions_bounded"] == 0 and len(run.results) == 9


def test_answer_lengths_are_learned_from_answers_that_may_stop(tiny_model: Path):
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=make_prompt(n, 30)) for n in range(8)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    with Engine(tiny_model, VALUES) as engine:
        seen = engine.scheduler.kv_policy_entry.lengths._seen
        engine.llm.generate(prompts, params, use_tqdm=False)
        assert not seen
        params.ignore_eos = False
        engine.llm.generate(prompts, params, use_tqdm=False)
        assert len(seen) == 8
    assert all(length <= 40 and stopped == (length < 40) for length, stopped in seen)
