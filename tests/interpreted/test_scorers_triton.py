"""Scorers that look at single keys or values, on pages and in Triton.

Tolerance: scores are float32 and of the size of one.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced
from support import event_inputs as events
from support.calibration_files import make_calibration
from support.scattered_pages import scattered
from support.words import built
from vllm_kvpolicy.kernels import paged_reductions
from vllm_kvpolicy.policies.names import SCORERS as ROWS
from vllm_kvpolicy.policies.scorers.keydiff import KeyDiffScorer
from vllm_kvpolicy.policies.scorers.knorm import KnormScorer
from vllm_kvpolicy.policies.scorers.qfilter import QFilterScorer
from vllm_kvpolicy.policies.scorers.triattention import TriAttentionScorer
from vllm_kvpolicy.policies.words import BaseScorer

SIZES = events.LAYERS, events.HEADS, events.GROUP, events.SIZE
# The operation that each runs, and what it reads without a copy.
SCORERS: dict[str, tuple[Callable[[], BaseScorer], str, str]] = {
    "knorm": (lambda: built(KnormScorer), "paged_norms", "keys"),
    "keydiff": (lambda: built(KeyDiffScorer), "paged_cosines", "keys"),
    "expected": (
        lambda: built(ROWS["expected"], expected_window=16),
        "paged_norms",
        "values",
    ),
    "qfilter": (
        lambda: QFilterScorer(make_calibration("qfilter", *SIZES)),
        *("paged_projections", "keys"),
    ),
    "triattention": (
        lambda: TriAttentionScorer(make_calibration("triattention", *SIZES), "max"),
        *("paged_pair_projections", "keys"),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_those_of_the_references(name: str, dtype: torch.dtype) -> None:
    build, operation, field = SCORERS[name]
    scorer = build()
    inputs = events.make_inputs(scorer.needs, dtype=dtype)
    paged = scattered(getattr(inputs, field), inputs.lengths, 16)
    with forced("reference"):
        want = scorer.score(inputs, None)
    calls = getattr(paged_reductions, operation).calls
    before = calls["triton"]
    got = scorer.score(replace(inputs, **{field: paged}), None)
    assert calls["triton"] == before + 1
    assert "dense" not in vars(paged)  # nothing was copied
    valid = inputs.valid
    assert got.shape == valid.shape and got.dtype == torch.float32
    torch.testing.assert_close(got[valid], want[valid], rtol=1e-5, atol=3e-6)
