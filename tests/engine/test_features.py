"""vLLM's other features beside a policy: what the guards let through is run here.

Parallel sampling, priorities, structured output, beam search, cache resets and pauses
in the middle of a run. Most tests share engines.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.engine.helpers import Engine, Job, Run, make_jobs, make_prompt

VALUES = {"budget": 96, "interval": 40, "prefill_interval": 128}
LENGTHS = (40, 150, 300)
PATTERN = "([a-m][n-z]){50}"
RESET_STEPS = (40, 41, 70)
LATE = 7


def with_values(policy: str | None, **changes: Any) -> dict[str, Any] | None:
    """Return a policy's plain form, None for stock vLLM."""
    return policy and {"policy": policy, **VALUES, **changes} or None


def as_prompts(jobs: list[Job]) -> list[Any]:
    """Return the jobs' prompts as LLM.generate takes them."""
    from vllm import TokensPrompt

    return [TokensPrompt(prompt_token_ids=job.prompt) for job in jobs]


def assert_full(engine: Engine) -> None:
    """Every superblock is back in the pool; runs of jobs check that themselves."""
    engine.tell_worker_of_the_last_finish()
    assert engine.num_free == engine.num_usable


Engines = dict[str | None, Engine]


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> Iterator[Engines]:
    """Stock vLLM, one that moves tokens and one that drops them.

    Tests with engines of their own come last in this file: vLLM takes down with one
    what all share.
    """
    changes = {
        # vLLM's first choice: llguidance does not know the tiny tokenizer's decoder.
        "structured_outputs_config": {"backend": "xgrammar"},
        "disable_hybrid_kv_cache_manager": False,
    }
    with ExitStack() as stack:
        yield {
            policy: stack.enter_context(
                Engine(tiny_model, with_values(policy), **changes)
            )
            for policy in (None, "identity", "ams-tova")
        }


def events_of(engine: Engine) -> float:
    """Return how many events an engine has had; 0 of stock vLLM."""
    is_stock = not hasattr(engine.scheduler, "kv_policy_counters")
    return 0 if is_stock else engine.counters()["events"]


# -- several answers ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["identity", "ams-tova"])
def test_answers_of_one_request(engines: Engines, policy: str) -> None:
    """n answers are n requests: each is what its own seed gives."""
    from vllm import SamplingParams

    engine = engines[policy]
    (prompt,) = as_prompts(make_jobs((90,), 0, seed=61))

    def answers(*wishes: dict[str, int]) -> list[list[int]]:
        params = [
            SamplingParams(max_tokens=90, ignore_eos=True, temperature=1.0, **wish)
            for wish in wishes
        ]
        outputs = engine.llm.generate([prompt] * len(params), params, use_tqdm=False)
        return [list(one.token_ids) for output in outputs for one in output.outputs]

    before = events_of(engine)
    sampled = answers({"n": 3, "seed": 7})
    assert_full(engine)
    assert events_of(engine) - before >= 6
    # vLLM seeds the answers of one request one after another.
    assert sampled == answers(*({"seed": 7 + index} for index in range(3)))
    assert len({tuple(tokens) for tokens in sampled}) == 3
    assert not engine.scheduler.kv_policy_planner.states


@pytest.mark.parametrize("length, reset_step", [(150, None), (60, 110)])
def test_a_seed_survives_cut_steps(
    engines: Engines, length: int, reset_step: int | None
) -> None:
    """A seed gives stock's tokens though events cut a prompt, or a recomputation."""
    from vllm import SamplingParams

    (prompt,) = as_prompts(make_jobs((length,), 0, seed=67))
    params = SamplingParams(seed=7, max_tokens=130, ignore_eos=True)
    tokens = {}
    for policy in (None, "identity"):
        engine = engines[policy]
        before, steps, outputs = events_of(engine), 0, []
        llm_engine = engine.llm.llm_engine
        llm_engine.add_request("seeded", prompt, params)
        while llm_engine.has_unfinished_requests():
            outputs += llm_engine.step()
            steps += 1
            if steps == reset_step:
                reset_running(engine)
        assert not policy or events_of(engine) - before >= 3
        tokens[policy] = list(outputs[-1].outputs[0].token_ids)
    assert len(tokens[None]) == params.max_tokens
    assert tokens["identity"] == tokens[None]


def test_beam_search(engines: Engines) -> None:
    """Each step of a beam is a prompt of its own; its events are prompt events."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True)
    prompts = as_prompts(make_jobs((190, 310), 0, seed=62))
    found = {}
    for policy, engine in engines.items():
        before = events_of(engine)
        outputs = engine.llm.beam_search(prompts, params)
        assert_full(engine)
        assert not policy or events_of(engine) - before >= 40
        found[policy] = [
            [beam.tokens for beam in output.sequences] for output in outputs
        ]
    assert found["identity"] == found[None]
    assert found["ams-tova"] != found[None]


# -- structured output ----------------------------------------------------------------


def test_structured_output(engines: Engines) -> None:
    """Answers match the pattern while events happen; `identity` gives stock's."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0,
        max_tokens=120,
        structured_outputs=StructuredOutputsParams(regex=PATTERN),
    )
    prompts = as_prompts(make_jobs(LENGTHS, 0, seed=63))
    texts = {}
    for policy, engine in engines.items():
        before = events_of(engine)
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
        assert_full(engine)
        assert not policy or events_of(engine) - before >= 10
        texts[policy] = [output.outputs[0].text for output in outputs]
        assert all(re.fullmatch(PATTERN, text) for text in texts[policy])
    assert texts["identity"] == texts[None]
    assert texts["ams-tova"] != texts[None]


# -- resets and pauses ----------------------------------------------------------------


def reset_running(engine: Engine) -> None:
    """Take all blocks from all running requests."""
    assert engine.llm.reset_prefix_cache(reset_running_requests=True)


def pause_and_go_on(engine: Engine) -> None:
    """Pause as a weight update does: the cache goes, requests stay."""
    engine.core.pause_scheduler("keep")
    assert engine.num_free == engine.num_usable
    engine.llm.llm_engine.step()
    engine.core.resume_scheduler()


@pytest.mark.parametrize("interrupt", [reset_running, pause_and_go_on])
def test_interrupted_runs(
    engines: Engines, interrupt: Callable[[Engine], None]
) -> None:
    """Requests whose blocks all go are computed anew, events included."""
    jobs = make_jobs(LENGTHS, 100, seed=65)

    def run(policy: str) -> Run:
        steps, engine = 0, engines[policy]
        before = events_of(engine)

        def on_step(engine: Engine) -> None:
            nonlocal steps
            steps += 1
            if steps in RESET_STEPS:
                interrupt(engine)

        run = engine.run(jobs, on_step)
        assert events_of(engine) - before >= 15
        assert run.preemptions == len(RESET_STEPS) * len(jobs)
        return run

    assert run("identity").tokens == engines[None].run(jobs).tokens
    # One that drops tokens computes its answer anew with what it then keeps: it ends.
    run("ams-tova")


# -- flags without effect, in engines of their own ------------------------------------


def test_layers_of_one_kind_need_no_hybrid_cache_manager(
    engines: Engines, tiny_model: Path
) -> None:
    """Whether it is on or off: models with layers of several kinds are refused."""
    jobs = make_jobs(LENGTHS, 80, seed=59)
    expected = engines["ams-tova"].run(jobs).tokens
    changes = {"disable_hybrid_kv_cache_manager": True}
    with Engine(tiny_model, with_values("ams-tova"), **changes) as engine:
        scheduler = engine.scheduler.scheduler_config
        assert scheduler.disable_hybrid_kv_cache_manager is True
        assert engine.run(jobs).tokens == expected
        assert engine.counters()["events"] >= 5


def test_the_cache_may_name_the_models_own_dtype(tiny_model: Path) -> None:
    jobs, found = make_jobs((150, 300), 50, seed=58), []
    for name in ("auto", "bfloat16"):
        changes = {"dtype": "bfloat16", "kv_cache_dtype": name}
        with Engine(tiny_model, with_values("ams-tova"), **changes) as engine:
            assert engine.worker.cache_config.cache_dtype == name
            found.append(engine.run(jobs).tokens)
            assert engine.counters()["events"] >= 3
    assert found[0] == found[1]


# -- priorities -----------------------------------------------------------------------


def run_with_priorities(engine: Engine) -> tuple[Run, int]:
    """Run five requests and three late, urgent ones.

    Returns:
        The run, and how often a request lost its blocks in the step of its event.
    """
    jobs = make_jobs((90, 120, 150, 180, 210), 60, seed=64)
    jobs += [
        Job(f"late{index}", make_prompt(640 + index, 170), 40, arrives=LATE + index)
        for index in range(3)
    ]
    undone = 0
    preempt = engine.scheduler._preempt_request

    def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal undone
        planner = getattr(engine.scheduler, "kv_policy_planner", None)
        undone += planner is not None and request.request_id in planner._events
        return preempt(request, *args, **kwargs)

    engine.scheduler._preempt_request = watched
    return engine.run([replace(job, priority=-job.arrives) for job in jobs]), undone


def test_urgent_requests_preempt(tiny_model: Path) -> None:
    """Urgent requests take the blocks of others, even of those with an event."""
    changes = {"scheduling_policy": "priority", "num_blocks": 36, "max_model_len": 896}
    found = {}
    for policy in (None, "identity", "streaming"):
        values = with_values(policy, interval=2)
        with Engine(tiny_model, values, **changes) as engine:
            found[policy], undone = run_with_priorities(engine)
            assert not policy or found[policy].counters["events"] >= 40
            assert undone > 0 or policy != "identity"
    assert min(found[None].preemptions, found["identity"].preemptions) > 0
    assert found["identity"].tokens == found[None].tokens
