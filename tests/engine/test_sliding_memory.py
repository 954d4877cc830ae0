"""Memory of models with windows or states: what is not bounded is counted."""

from collections.abc import Iterator

import pytest

from support.engine.helpers import Engine, footprint_of, make_jobs
from support.made_hybrids import DOUBLED, SETTINGS
from support.made_sliding import NUM_GROUPS
from support.sweeps import every_name

VALUES = {"policy": "ams-tova", "budget": 110, "interval": 56, "prefill_interval": 256}
GROUPS = {"gemma3": NUM_GROUPS, "gpt_oss": 1, "lfm2": 2}
GROUPS |= {"gemma4_31b": 2, "gemma4_e2b": 2, "mimo_v2": 2, "gemma3n": 2}
LARGE = {**VALUES, "budget": 160, "prefill_interval": 384}
# Groups of states save those that others may go on from.
PREFIXES = ", prefixes"

KINDS = [*GROUPS] if every_name else ["gemma3", "lfm2", "gemma4_31b", "gemma4_e2b"]


@pytest.fixture(scope="module", params=[*KINDS, f"lfm2{PREFIXES}"])
def engine(request, folders) -> Iterator[Engine]:
    kind = request.param.partition(",")[0]
    changes = {"max_num_batched_tokens": 96} | SETTINGS.get(kind, {})
    changes |= {"enable_prefix_caching": request.param.endswith(PREFIXES)}
    values = LARGE if kind in DOUBLED else VALUES
    with Engine(folders(kind), values, **changes) as engine:
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


def test_a_pool_too_small_for_windows_is_refused(folders) -> None:
    """The policy's own superblocks would fit, with a few of the windows."""
    given = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 20 * 2 * 16384}
    with pytest.raises(ValueError, match="^KV cache memory: "):
        Engine(folders("gemma3"), VALUES, max_num_batched_tokens=512, **given)
