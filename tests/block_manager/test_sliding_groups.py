"""What layers with a sliding window hold, against vLLM's own groups and managers."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_page_size,
    is_kv_cache_spec_uniform,
)
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_kvpolicy.block_manager.manager import KVPolicySpec
from vllm_kvpolicy.block_manager.other_groups import OtherBlocks
from vllm_kvpolicy.sizes import OtherGroups
from vllm_kvpolicy.worker.worker import check_groups

SIZES = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}


def groups(full: int, sliding: int, **changes: int) -> OtherGroups:
    values = {"window": 48, "block_size": 32, "step_tokens": 96, "late_steps": 0}
    return OtherGroups(num_full=full, num_others=sliding, **{**values, **changes})


@pytest.mark.parametrize(
    ("full", "sliding"), [(2, 5), (10, 52), (12, 12), (13, 12), (3, 2), (4, 3), (1, 9)]
)
def test_groups_are_those_of_vllm(full: int, sliding: int) -> None:
    """Of a model whose first layer is full attention."""
    specs = {f"f{i}": KVPolicySpec(**SIZES) for i in range(full)}
    specs |= {
        f"s{i}": SlidingWindowSpec(**SIZES, sliding_window=48) for i in range(sliding)
    }
    assert not is_kv_cache_spec_uniform(specs)
    made = _get_kv_cache_groups_uniform_page_size(specs)
    windows = [isinstance(g.kv_cache_spec, SlidingWindowSpec) for g in made]
    found = groups(full, sliding)
    assert (found.num_full_groups, found.count) == (windows.count(False), sum(windows))
    assert found.layers_per_group == max(len(g.layer_names) for g in made)


@pytest.mark.parametrize("window", [1, 32, 33, 48, 100])
@pytest.mark.parametrize("step", [1, 7, 96])
def test_what_is_held_is_what_vllm_leaves(window: int, step: int) -> None:
    """Steps of equal lengths: superblocks below vLLM's window come back."""
    found = groups(1, 1, window=window, step_tokens=step)
    most = 0
    for computed in range(0, 500, step):
        skipped = SlidingWindowManager.get_num_skipped_tokens(
            SimpleNamespace(sliding_window=window, extra_retained_tokens=0), computed
        )
        held = -(-(computed + step) // 32) - skipped // 32
        assert found.held(computed, computed + step) == held
        most = max(most, held)
    assert most <= found.most_blocks(500) <= most + 2


def test_models_without_windows_hold_nothing_beside() -> None:
    for full in (0, 4):
        found = groups(full, 0)
        assert (found.count, found.most_blocks(10_000)) == (0, 0)


@pytest.mark.parametrize("num_made", [0, 4, 6])
def test_windows_that_vllm_did_not_make_are_refused(num_made: int) -> None:
    """A model's own code may decide about its windows."""
    specs = {f"f{i}": FullAttentionSpec(**SIZES) for i in range(2)}
    windows = [SlidingWindowSpec(**SIZES, sliding_window=48)] * 5
    check_groups(
        specs | {f"s{i}": spec for i, spec in enumerate(windows)}, groups(2, 5), 32
    )
    states = [MambaSpec(32, ((size, 2048),), (torch.float32,)) for size in (1, 1)]
    kept = {f"m{i}": spec for i, spec in enumerate(states)}
    check_groups(specs | kept, groups(2, 2, window=2), 32)
    kept["m1"] = MambaSpec(32, ((2, 1024),), (torch.float32,))
    with pytest.raises(ValueError, match="of 2 kinds"):
        check_groups(specs | kept, groups(2, 2, window=2), 32)
    made = {f"s{i}": windows[0] for i in range(num_made)}
    with pytest.raises(ValueError, match=f"made {num_made} layers .*expected 5 with"):
        check_groups(specs | made, groups(2, 5), 32)


def test_a_state_that_is_kept_is_never_back() -> None:
    """Without saved states a group holds one superblock, of however many tokens."""
    block = SimpleNamespace(is_null=False, ref_cnt=1, block_id=7)
    manager = SimpleNamespace(
        req_to_blocks={"a": [block]},
        block_size=4096,
        has_prefill_checkpoint_blocks=False,
    )
    sizes = groups(2, 4, window=2, most_each=1)
    beside = OtherBlocks(sizes, [manager] * 2, lambda request_id: 500)
    assert beside.held("a") == sizes.most_blocks(600) == 2
    assert beside.needed("a", 500, 501, 1) == beside.needed("a", 500, 900, 8) == 0
    assert beside.needed("b", 0, 40, 40) == 2
