"""TriAttention against the authors' own scores and kept tokens."""

import numpy as np
import pytest
import torch
from torch import Tensor

from support.golden import Golden, params
from vllm_kvpolicy.kernels.ranking import ascending_indices, top_k_mask
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.calibration import Calibration
from vllm_kvpolicy.policies.scorers.triattention import TriAttentionScorer

GOLDEN = "triattention"

ROUNDS = 9
VARIANTS = ("score_mean", "score_mean_nomlr", "score_mean_notrig")


def scorer(golden: Golden, case: int, aggregate: str = "max") -> TriAttentionScorer:
    num_layers, num_heads, num_kv_heads, size = map(int, golden["shape"])
    stored = {
        "query_real": "q_mean_real",
        "query_imag": "q_mean_imag",
        "query_abs": "q_abs_mean",
    }
    tensors = {
        name: torch.from_numpy(golden[f"r{case:02d}_{theirs}"])
        for name, theirs in stored.items()
    }
    calibration = Calibration(
        "triattention", "", num_layers, num_heads, num_kv_heads, size, 0, 0, tensors
    )
    return TriAttentionScorer(calibration, aggregate)


def event(golden: Golden, case: int) -> EventInputs:
    p = params(golden, "", case)
    keys = torch.from_numpy(golden[f"r{case:02d}_k"])[None]
    rows = keys.shape[:4]
    is_prompt = torch.arange(rows[3]) < int(p["prefix"])
    return EventInputs(
        lengths=torch.full(rows[:3], rows[3]),
        must_keep=is_prompt.expand(rows),
        end=torch.tensor([int(p["t"])]),
        scale=1.0,
        keys=keys,
        rope=Rope.from_theta(p["rope_theta"], keys.shape[-1]),
    )


def kept(p: dict[str, float], inputs: EventInputs, score: Tensor) -> np.ndarray:
    """Best K tokens, the prompt among them, [L, Hk, K]."""
    budget = int(p["K"])
    keep = top_k_mask(score[0], inputs.must_keep[0], inputs.valid[0], budget)
    return ascending_indices(keep.flatten(0, 1), budget).view(*score.shape[1:3], -1)


def test_golden_file_is_complete(golden: Golden) -> None:
    assert len(golden["params"]) == ROUNDS


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", range(ROUNDS))
def test_scores_of_query_heads(golden: Golden, case: int, variant: str) -> None:
    """Of both sums, without |Q| in the second, and without the first."""
    made = scorer(golden, case)
    if variant == "score_mean_nomlr":
        made.by_length += made.query.abs()
    elif variant == "score_mean_notrig":
        made.query *= 0
    got = made.per_query_head(event(golden, case))
    older = got[0, :, :, int(params(golden, "", case)["prefix"]) :]
    want = golden[f"r{case:02d}_{variant}"]
    np.testing.assert_allclose(older, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", range(ROUNDS))
def test_scores_as_shipped(golden: Golden, case: int) -> None:
    got = scorer(golden, case).per_query_head(event(golden, case))
    older = got[0, :, :, int(params(golden, "", case)["prefix"]) :]
    want = golden[f"r{case:02d}_score_mean_authors_fp32"]
    np.testing.assert_allclose(older, want, rtol=0, atol=5e-3)


@pytest.mark.parametrize("aggregate", ["max", "mean"])
@pytest.mark.parametrize("case", range(ROUNDS))
def test_kept_by_z_scores(golden: Golden, case: int, aggregate: str) -> None:
    inputs = event(golden, case)
    score = scorer(golden, case, aggregate).score(inputs, None)
    got = kept(params(golden, "", case), inputs, score)
    want = golden[f"r{case:02d}_keep_plph_{aggregate}_norm"]
    np.testing.assert_array_equal(got, want)
