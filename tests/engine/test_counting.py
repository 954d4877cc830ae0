"""What stock vLLM's requests hold, counted; the simulation compares those of ours."""

from support.engine.helpers import BLOCK, Engine, make_jobs
from vllm_kvpolicy.compat import COUNTING_CLASSES


def test_stock_counts_what_whole_requests_hold(tiny_model):
    """Blocks grow by one every BLOCK tokens; the last token has no place."""
    prompts, output = (40, 100, 7), 70
    jobs = make_jobs(prompts, output, seed=3)
    with Engine(tiny_model, scheduler_cls=COUNTING_CLASSES[True]) as engine:
        name = f"{type(engine.scheduler).__module__}.{type(engine.scheduler).__name__}"
        is_async = bool(engine.scheduler.vllm_config.scheduler_config.async_scheduling)
        assert name == COUNTING_CLASSES[is_async]
        engine.run(jobs)
        found = engine.counters()
    lengths = [prompt + output - 1 for prompt in prompts]
    assert found["requests"] == 3
    assert found["peak_blocks"] == sum(-(-length // BLOCK) for length in lengths)
    assert (found["steps"], found["request_steps"]) == (output, 3 * output)
    held = [
        -(-(prompt + step) // BLOCK) for prompt in prompts for step in range(output)
    ]
    assert found["block_steps"] == sum(held)
    assert found["events"] == 0


def test_a_preempted_request_is_one_request(tiny_model):
    """Its peak is the largest of all times that it ran."""
    small = {"num_blocks": 9, "max_model_len": 192}
    counting = COUNTING_CLASSES[False]
    with Engine(tiny_model, scheduler_cls=counting, **small) as engine:
        run = engine.run(make_jobs((60, 60), 120, seed=5))
        found = engine.counters()
    assert run.preemptions > 0
    assert (found["requests"], found["peak_blocks"]) == (2, 2 * -(-179 // BLOCK))
    assert found["steps"] < found["request_steps"] < 2 * found["steps"]
