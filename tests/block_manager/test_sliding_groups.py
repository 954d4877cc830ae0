"""What layers with a sliding window hold, against vLLM's own groups and managers."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_kvpolicy.sizes import SlidingGroups

SIZES = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}


def groups(full: int, sliding: int, **changes: int) -> SlidingGroups:
    values = {"window": 48, "block_size": 32, "step_tokens": 96, "late_steps": 0}
    return SlidingGroups(num_full=full, num_sliding=sliding, **{**values, **changes})


@pytest.mark.parametrize(
    ("full", "sliding"), [(2, 5), (10, 52), (12, 12), (13, 12), (3, 2), (4, 3), (1, 9)]
)
def test_groups_are_those_of_vllm(full: int, sliding: int) -> None:

    specs = {f"f{i}": FullAttentionSpec(**SIZES) for i in range(full)}
    specs |= {
        f"s{i}": SlidingWindowSpec(**SIZES, sliding_window=48) for i in range(sliding)
    }
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
