"""R-KV against the authors' own results: redundancy, scores, kept sets, chains."""

import numpy as np
import pytest
import torch
from torch import Tensor

from support.golden import Golden, params
from support.words import built
from vllm_kvpolicy.kernels.ranking import ascending_indices, top_k_mask
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.names import SCORERS

GOLDEN = "rkv_original"

SINGLES, CHAINS = 28, 5


def score(p: dict[str, float], keys: np.ndarray, queries: np.ndarray) -> Tensor:
    """Score [Hk, T] of keys [Hk, T, D] and queries [Hq, W, D]."""
    num_heads, num_tokens, size = keys.shape
    rows = (1, 1, num_heads, num_tokens)
    inputs = EventInputs(
        lengths=torch.full(rows[:3], num_tokens),
        must_keep=torch.zeros(rows, dtype=torch.bool),
        end=torch.tensor([num_tokens]),
        scale=size**-0.5,
        keys=torch.from_numpy(keys)[None, None],
        queries=torch.from_numpy(queries)[None, None],
    )
    scorer = built(
        SCORERS["rkv"],
        rkv_window=int(p["W"]),
        rkv_kernel=int(p["kernel"]),
        rkv_lambda=p["lambda"],
    )
    return scorer.score(inputs, None)[0, 0]


def kept(p: dict[str, float], scores: Tensor) -> np.ndarray:
    """Best K - W tokens and the newest W, as token indices [Hk, K]."""
    newest = torch.zeros_like(scores, dtype=torch.bool)
    newest[:, -int(p["W"]) :] = True
    valid = torch.ones_like(newest)
    keep = top_k_mask(scores, newest, valid, int(p["K"]))
    return ascending_indices(keep, int(p["K"])).numpy()


def test_golden_file_is_complete(golden: Golden) -> None:
    assert len(golden["single_params"]) == SINGLES
    assert len(golden["chain_params"]) == CHAINS


@pytest.mark.parametrize("case", range(SINGLES))
def test_single_event(golden: Golden, case: int) -> None:
    p, prefix = params(golden, "single", case), f"s{case:02d}_"
    got = score(p, golden[prefix + "k"], golden[prefix + "q"])
    older = got[:, : -int(p["W"])]
    np.testing.assert_allclose(older, golden[prefix + "final"], rtol=1e-4, atol=1e-7)
    highest = older.amax(-1, keepdim=True)
    assert (got[:, -int(p["W"]) :] == highest).all()
    np.testing.assert_array_equal(kept(p, got), golden[prefix + "keep"])


@pytest.mark.parametrize("case", range(CHAINS))
def test_chain_of_events_in_time_order(golden: Golden, case: int) -> None:
    p, prefix = params(golden, "chain", case), f"c{case:02d}_"
    heads = np.arange(int(p["Hk"]))[:, None]
    end = int(p["T_first"])
    held = np.tile(np.arange(end), (len(heads), 1))
    for event in range(int(p["n_events"])):
        step = f"{prefix}sorted_e{event}_"
        np.testing.assert_array_equal(held, golden[step + "pos_in"])
        got = score(p, golden[prefix + "k"][heads, held], golden[prefix + "q"][event])
        older = got[:, : -int(p["W"])]
        np.testing.assert_allclose(older, golden[step + "final"], rtol=1e-4, atol=1e-7)
        held = np.take_along_axis(held, kept(p, got), 1)
        np.testing.assert_array_equal(held, np.sort(golden[step + "pos_out"]))
        newer = np.tile(np.arange(end, end + int(p["I"])), (len(heads), 1))
        held, end = np.concatenate([held, newer], 1), end + int(p["I"])
