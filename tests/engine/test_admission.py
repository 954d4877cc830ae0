"""Who may enter an engine, and that nobody has to leave it."""

import random
from pathlib import Path
from typing import Any

import pytest

from support.engine.helpers import (
    BLOCK,
    Engine,
    Job,
    Run,
    make_jobs,
    make_prompt,
    serve,
)

VALUES = {
    "policy": "snapkv",
    "budget": 96,
    "interval": 64,
    "recent": 16,
    "prefill_interval": 64,
}
PEAK = 8  # superblocks: 96 + 64 tokens, one for where they begin, two for the window


def preempted(run: Run) -> tuple[float, float]:
    """Return preemptions as they are counted, of requests with a bound and without."""
    counted = run.counters
    return counted["preemptions_bounded"], counted["preemptions_unbounded"]


def count_tokens(engine: Engine) -> list[int]:
    """Return a list that grows by the tokens of every step."""
    counts: list[int] = []
    schedule = engine.scheduler.schedule

    def counted(*args: Any) -> Any:
        output = schedule(*args)
        counts.append(output.total_num_scheduled_tokens)
        return output

    engine.scheduler.schedule = counted
    return counts


def test_requests_that_start_together_hardly_wait_for_each_other(tiny_model):
    """12 of 60 + 220 tokens: as many steps as one of them takes, and 2 % more."""
    values = {"policy": "ams-tova", "budget": 96, "interval": 128}
    jobs = make_jobs([60] * 12, 220, seed=5)
    run = serve(tiny_model, values, jobs, max_num_seqs=12, num_blocks=300)
    assert run.counters["events"] >= 12
    assert run.preemptions == 0
    assert run.steps <= 226


@pytest.mark.slow
def test_five_hundred_requests_in_a_pool_that_holds_six(tiny_model):
    rng = random.Random(6)
    jobs = []
    for number in range(500):
        budget = rng.randint(52, VALUES["budget"])
        jobs.append(
            Job(
                name=f"r{number}",
                prompt=make_prompt(number, rng.randint(5, 150)),
                max_tokens=rng.randint(1, 120),
                arrives=number // 2,
                extra_args={"kv_budget": budget} if rng.random() < 0.7 else None,
            )
        )
    running = []
    with Engine(tiny_model, VALUES, num_blocks=6 * PEAK + 1) as engine:
        run = engine.run(
            jobs, lambda engine: running.append(len(engine.scheduler.running))
        )
        assert preempted(run) == (0, 0)
    assert run.preemptions == 0 and len(run.results) == 500
    for job in jobs:
        assert len(run.results[job.name].tokens) == job.max_tokens
    assert run.counters["events"] > 300 and run.counters["held_back"] > 1000
    assert sum(running) / len(running) > 6, "requests below their peak are more"


def test_vllms_rule_preempts_where_the_forecast_does_not(tiny_model):
    """The same requests, admitted as vLLM does: what the forecast is for."""
    jobs = make_jobs([40] * 10, 200, seed=7)
    time, preemptions = {}, {}
    for foresees in (True, False):
        sizes = {"num_blocks": 6 * PEAK + 1, "foresees": foresees}
        with Engine(tiny_model, VALUES, **sizes) as engine:
            computed = count_tokens(engine)
            run = engine.run(jobs)
            assert preempted(run) == (run.preemptions, 0)
            # A step costs about as much as ten tokens more in it.
            time[foresees] = 10 * run.steps + sum(computed)
            preemptions[foresees] = run.preemptions
    assert time[True] <= time[False]
    assert preemptions[True] < 0.5 * preemptions[False]


def test_nobody_waits_longer_than_those_before_take(tiny_model):
    """A request that needs the whole pool comes while small ones keep coming."""
    values = VALUES | {"budget": 512, "interval": 128, "prefill_interval": 512}
    large = Job("large", make_prompt(1, 400), 150, arrives=10)
    small = [Job(f"s{n}", make_prompt(n + 2, 30), 60, arrives=n * 4) for n in range(30)]
    entered = {}

    def note(engine: Engine) -> None:
        step = len(steps)
        steps.append(step)
        for request in engine.scheduler.running:
            entered.setdefault(request.request_id.rpartition("-")[0], step)

    steps: list[int] = []
    pool = -(-550 // BLOCK) + 4
    sizes = {"num_blocks": pool, "max_model_len": 576}
    with Engine(tiny_model, values, **sizes) as engine:
        run = engine.run([*small, large], note)
    # Small ones that came behind it are preempted: they are cheap to compute again.
    assert preempted(run) == (run.preemptions, 0) and len(run.results) == 31
    # Those that ran when it came have at most 60 tokens to go; nobody overtakes it.
    assert entered["large"] - large.arrives <= 60 + 2
    assert run.results["large"].tokens


def test_requests_without_a_bound_may_still_preempt(tiny_model):
    whole = {"kv_policy": "none"}
    jobs = [
        Job(f"r{n}", make_prompt(n, 50), 200, extra_args=whole if n % 3 == 0 else None)
        for n in range(9)
    ]
    run = serve(tiny_model, VALUES, jobs, num_blocks=5 * PEAK + 1)
    bounded, unbounded = preempted(run)
    assert unbounded == run.preemptions > 0 == bounded
    assert len(run.results) == 9


@pytest.mark.parametrize("ignores_eos", [True, False])
def test_answer_lengths_are_learned_from_answers_that_may_stop(
    tiny_model: Path, ignores_eos: bool
) -> None:
    from vllm import SamplingParams, TokensPrompt

    with Engine(tiny_model, VALUES) as engine:
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=40, ignore_eos=ignores_eos
        )
        prompts = [TokensPrompt(prompt_token_ids=make_prompt(n, 30)) for n in range(8)]
        engine.llm.generate(prompts, params, use_tqdm=False)
        seen = engine.scheduler.kv_policy_entry.lengths._seen
    assert len(seen) == (0 if ignores_eos else 8)
    assert all(length <= 40 and stopped == (length < 40) for length, stopped in seen)
