"""Memory of models with windows or states: what is not bounded is counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import made_hybrids
from support.engine.helpers import Engine, footprint_of, make_jobs
from support.made_sliding import NUM_GROUPS

VALUES = {"policy": "ams-tova", "budget": 110, "interval": 56, "prefill_interval": 256}
GROUPS = {"gemma3": NUM_GROUPS, "gpt_oss": 1, "lfm2": 2}
GROUPS |= {"gemma4_31b": 2, "gemma4_e2b": 2, "mimo_v2": 2, "gemma3n": 2}
LARGE = {**VALUES, "budget": 160, "prefill_interval": 384}
SETTINGS = {
    "lfm2": made_hybrids.SETTINGS["lfm2"],
    # Groups of states save those that others may go on from.
    "lfm2, prefixes": made_hybrids.SETTINGS["lfm2"] | {"enable_prefix_caching": True},
}


@pytest.fixture(scope="module", params=[*GROUPS, "lfm2, prefixes"])
def engine(request, folders) -> Iterator[Engine]:
    kind = request.param.partition(",")[0]
    model, changes = folders(kind), SETTINGS.get(request.param, {})
    values = LARGE if kind in made_hybrids.DOUBLED else VALUES
    with Engine(model, values, max_num_batched_tokens=96, **changes) as engine:
        others = engine.scheduler.kv_policy_manager.others
        assert len(others.managers) == GROUPS[kind]
        engine.values = values
        yield engine


@pytest.mark.parametrize(("length", "max_tokens"), [(40, 300), (600, 150)])
def test_what_is_held_is_bounded_and_counted(
    engine: Engine, length: int, max_tokens: int
) -> None:
    """In every step, and the most of each kind is reached."""
    own, beside, manager = [], [], engine.scheduler.kv_policy_manager
    (job,) = make_jobs((length,), max_tokens, seed=12)

    def note(engine: Engine) -> None:
        for request_id in engine.scheduler.kv_policy_planner.states:
            held = manager.num_held(request_id)
            assert held == engine.num_usable - engine.num_free
            beside.append(manager.others.held(request_id))
            own.append(held - beside[-1])

    engine.run([job], note)
    tokens = length + max_tokens - 1
    size = manager.block_size
    footprint = footprint_of(engine.values, job, size)
    assert max(own) == footprint.peak_blocks(tokens)
    most = manager.others.sizes.most_blocks
    assert max(beside) <= most(tokens)
    assert 0 < max(beside[-max_tokens + 100 :]) <= most(tokens, step=1)
    others = manager.others.managers
    whole = sum(-(-tokens // each.block_size) for each in [manager, *others])
    assert max(own) + max(beside) < whole


def test_many_requests_take_turns_without_preemptions(gemma3: Path) -> None:
    """The forecast counts windows: who enters is never preempted."""
    changes = {"num_blocks": 56, "max_model_len": 512, "max_num_batched_tokens": 96}
    jobs = make_jobs((40, 90, 200, 310, 60, 130, 250), 150, seed=9)
    with Engine(gemma3, VALUES, **changes) as engine:
        run = engine.run(jobs)
        held_back = engine.scheduler.kv_policy_entry.num_held_back
    assert run.preemptions == 0 and held_back > 0


def test_a_pool_too_small_for_windows_is_refused(gemma3: Path) -> None:
    """The policy's own superblocks would fit, with a few of the windows."""
    given = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 20 * 2 * 16384}
    with pytest.raises(ValueError, match="^KV cache memory: "):
        Engine(gemma3, VALUES, max_num_batched_tokens=512, **given)
