"""What the authors of WG-KV read behind their gates, and what they evict there."""

import numpy as np
import pytest
import torch

from support.golden import Golden, params
from support.words import built
from vllm_kvpolicy.kernels.page_bounds import best_pages, page_bounds_ref
from vllm_kvpolicy.policies.selections.quest import Quest

GOLDEN = "wgkv_gate"


def unpacked(golden: Golden, name: str, size: int) -> np.ndarray:
    return np.unpackbits(golden[name], axis=-1)[..., :size].astype(bool)


@pytest.mark.parametrize("case", [0, 1])
def test_pages_that_the_authors_read(golden: Golden, case: int) -> None:
    """Theirs, a page that is not full is always read and counts as one."""
    p = params(golden, "quest", case)
    num_heads, window, size = int(p["H"]), int(p["W"]), int(p["page"])
    keep = golden[f"quest{case}_bits"]
    want = unpacked(golden, f"quest{case}_read_packed", keep.shape[1])
    keys = torch.from_numpy(golden[f"quest{case}_k"])
    queries = torch.from_numpy(golden[f"quest{case}_q"]).unflatten(0, (num_heads, -1))
    quest = built(Quest, quest_budget=int(p["token_budget"]))
    chosen_of_several = 0
    for step in range(int(p["steps"])):
        position = int(p["prompt"]) + step
        local = range(position - window + 1, position + 1)
        (most,) = quest.most_pages(np.array([window]), size)
        for head in range(num_heads):
            admitted = np.flatnonzero(keep[head, : position - window + 1])
            num_full = len(admitted) // size
            full, rest = np.split(admitted, [num_full * size])
            pages = keys[head, full].unflatten(0, (-1, size))
            bounds = torch.zeros(2, num_full, keys.shape[-1])
            page_bounds_ref(bounds, pages, torch.arange(num_full))
            table = torch.arange(num_full, dtype=torch.int32)[None]
            count = torch.tensor([num_full])
            query = queries[head, :, step][None]
            scores = quest.scores(query, table, count.int(), bounds)
            left = max(0, int(most) - bool(len(rest)))
            num_read = count.clamp_max(left)
            chosen = best_pages(table, scores, count, num_read)[0, : int(num_read)]
            chosen_of_several += 0 < len(chosen) < num_full
            read = np.r_[full.reshape(-1, size)[chosen.numpy()].flatten(), rest, local]
            found = np.flatnonzero(want[step, head])
            assert sorted(read) == found.tolist(), (step, head)
    assert chosen_of_several > 5
