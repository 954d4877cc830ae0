"""Tests of attention that sees tokens until a position: of the reference and its twin.

What is seen comes from `kernels.visibility`, on logical tokens; the operation has
them on scattered pages, where some that nobody sees any more are gone and the others
hold NaN. Files of tests import all of them. Tolerances: a float32 softmax over at most
400 tokens, which both sides add up in different orders; in half precision the twin
rounds weights to the dtype of the values first.
"""

import os

import pytest
import torch

from support.worker.until_rows import Row, Step
from vllm_kvpolicy.kernels.visibility import until_attention

WHICH = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "reference"
HALF, FULL = torch.float16, torch.float32
PROMPTS = (
    Row(150, 37),
    Row(90, 1),
    Row(0, 0),
    Row(1, 1),
    Row(40, 40, kept=0.6, window=5),
    Row(200, 3, kept=0.02, gone=0.0),
    Row(64, 0),
    Row(66, 30, kept=1.0),
)
DECODES = (
    Row(150, 1),
    Row(64, 0),
    Row(1, 1),
    Row(0, 0),
    Row(300, 1, kept=0.9),
    Row(400, 1, kept=0.02, gone=0.0),
)
BATCHES = {"prompts": PROMPTS, "decodes": DECODES}


def run(step: Step, **changed: object) -> torch.Tensor:
    """Return the output of the reference, or of its twin."""
    arguments = step.arguments() | changed
    before = until_attention.calls[WHICH]
    assert until_attention(*arguments.values()) is None
    assert until_attention.calls[WHICH] == before + 1
    return arguments["output"]


def check_step(step: Step) -> torch.Tensor:
    """Compare with the reference, and with the definition; return the output."""
    got, arguments = run(step), step.arguments()
    until_attention.reference(*arguments.values())
    rounding = 2e-6 if step.query.dtype == FULL else 2e-3
    want = arguments["output"]
    torch.testing.assert_close(got, want, rtol=rounding, atol=rounding)
    torch.testing.assert_close(
        got.double(), step.expected, rtol=2 * rounding, atol=2 * rounding
    )
    return got


@pytest.mark.parametrize(
    ("group", "size", "page", "dtype"),
    [
        (1, 32, 16, HALF),
        (2, 64, 32, FULL),
        (3, 80, 16, FULL),
        (4, 128, 32, HALF),
        (5, 8, 32, FULL),
        (7, 256, 16, FULL),
        # Pages of one token, of none that divides a block, and larger than a block.
        (8, 32, 1, FULL),
        (3, 64, 5, HALF),
        (3, 32, 48, FULL),
        (2, 32, 128, FULL),
    ],
)
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_reference(
    name: str, group: int, size: int, page: int, dtype: torch.dtype
) -> None:
    step = Step(BATCHES[name], group, size, page, dtype)
    held, rows = step.lengths.tolist(), step.rows
    is_cut = any(length < row.tokens for length, row in zip(held, rows, strict=True))
    assert is_cut or page > 32
    check_step(step)


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_keys_stored_as_columns(name: str) -> None:
    want = run(Step(BATCHES[name]))
    assert torch.equal(run(Step(BATCHES[name], columns=True)), want)


@pytest.mark.parametrize("queries", [1, 2, 16, 60])
@pytest.mark.parametrize("window", [1, 13, 500])
@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_windows(kept: float, window: int, queries: int) -> None:
    """All keys, and a window alone: the two ends of admission."""
    check_step(Step([Row(60, queries, kept, window), Row(200, queries, kept, window)]))


@pytest.mark.parametrize("name", BATCHES)
def test_garbage_is_not_read(name: str) -> None:
    want = run(Step(BATCHES[name], garbage=0.0))
    for garbage in (torch.nan, torch.inf):
        assert torch.equal(run(Step(BATCHES[name], garbage=garbage)), want)
