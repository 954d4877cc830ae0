"""Allocators against kvpress's selections and budgets, index for index."""

import numpy as np
import pytest
import torch
from torch import Tensor

from support.golden import Golden
from support.words import built
from vllm_kvpolicy.policies.allocators.adakv import AdaKVAllocator
from vllm_kvpolicy.policies.allocators.chunk import ChunkAllocator
from vllm_kvpolicy.policies.allocators.pyramid import layer_budgets
from vllm_kvpolicy.policies.base import EventInputs

GOLDEN = "scorers_kvpress"

CHUNK_CASES, ADAKV_CASES, PYRAMID_CASES = 48, 33, 96


def cases(golden: Golden, kind: str) -> list[tuple[str, str, str]]:
    """Names of the selections, of the scores they came from, and their settings."""
    found = []
    for name in golden:
        prefix, is_kind, rest = name.partition(f"_{kind}_")
        if is_kind:
            scorer, _, settings = rest.partition("_c" if kind == "chunkkv" else "_r")
            found.append((name, f"{prefix}_score_{scorer}", settings))
    return found


def layer_of(score: np.ndarray) -> tuple[Tensor, EventInputs]:
    """Scores [1, 1, H, T] of one layer and an event that nothing must be kept of."""
    rows = torch.from_numpy(score)[None, None]
    held = torch.full(rows.shape[:3], rows.shape[3])
    nothing = torch.zeros_like(rows, dtype=torch.bool)
    return rows, EventInputs(held, nothing, held[:, 0, 0], 1.0)


def test_whole_chunks(golden: Golden) -> None:
    found = cases(golden, "chunkkv")
    assert len(found) == CHUNK_CASES
    for name, score, settings in found:
        rows, inputs = layer_of(golden[score])
        length = int(settings.partition("_")[0])
        want = golden[name].tolist()
        allocator = built(ChunkAllocator, chunk_length=length)
        got = allocator.choose(rows, inputs, None, len(want)).keep
        for head in got[0, 0]:
            assert head.nonzero().flatten().tolist() == want, name


def test_adakv(golden: Golden) -> None:
    found = cases(golden, "adakv")
    assert len(found) == ADAKV_CASES
    for name, score, _ in found:
        rows, inputs = layer_of(golden[score])
        want = torch.from_numpy(golden[name])
        heads, budget = len(want), int(want.sum()) // len(want)
        got = built(AdaKVAllocator).choose(rows, inputs, None, budget).keep[0, 0]
        assert torch.equal(got, want), name
        assert int(want.sum()) == heads * budget


@pytest.mark.parametrize("case", range(PYRAMID_CASES))
def test_pyramid_with_the_original_rounding(golden: Golden, case: int) -> None:
    row = dict(zip(golden["pyramid_cols"], golden["pyramid_params"][case], strict=True))
    num_layers, length = int(row["L"]), int(row["T"])
    budget = length * (1 - row["compression_ratio"])
    (exact,) = layer_budgets(
        num_layers, budget, torch.tensor([length]), row["beta"], int(row["window"])
    )
    want = golden["pyramid_budgets"][case]
    assert exact.round().tolist() == want[:num_layers].tolist()
    assert (want[num_layers:] == -1).all()
