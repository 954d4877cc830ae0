"""Filling up and trimming selections, against sorted() over tokens."""

import math

import pytest
import torch

from vllm_kvpolicy.kernels.ranking import rank_by, resize

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0])
ROWS, TOKENS, PAGE = 6, 40, 4


def awkward_scores(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return SPECIAL[torch.randint(len(SPECIAL), (ROWS, TOKENS), generator=generator)]


def key(score: torch.Tensor, i: int) -> tuple[float, int]:
    value = float(score[i])
    return (-math.inf if math.isnan(value) else value, i)


@pytest.mark.parametrize("seed", range(20))
def test_resize(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = awkward_scores(seed)
    pages = torch.randint(1, TOKENS // PAGE + 1, (ROWS,), generator=generator)
    lengths = pages * PAGE
    keep = torch.rand(ROWS, TOKENS, generator=generator) < 0.5
    must = torch.rand(ROWS, TOKENS, generator=generator) < 0.2
    quota = torch.randint(0, TOKENS // PAGE + 1, (ROWS,), generator=generator)
    got = resize(keep, score, must, pages, quota, PAGE)
    for r in range(ROWS):

        def grade(i: int, r: int = r) -> tuple[int, float, int]:
            first = 2 if must[r, i] else int(keep[r, i])
            return (first, *key(score[r], i))

        best = sorted(range(int(lengths[r])), key=grade, reverse=True)
        want = sorted(best[: int(quota[r]) * PAGE])
        assert got[r].nonzero().flatten().tolist() == want
    fixed = resize(keep, score, must, pages, torch.full_like(pages, 2), PAGE)
    assert torch.equal(fixed.sum(-1), lengths.clamp(max=2 * PAGE))


def test_rank_by() -> None:
    score = awkward_scores(1)
    first = torch.randint(
        -2, 3, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    got = rank_by(first, score)
    for r in range(ROWS):
        order = sorted(
            range(TOKENS),
            key=lambda i, r=r: (int(first[r, i]), *key(score[r], i)),
            reverse=True,
        )
        assert [int(got[r, i]) for i in order] == list(range(TOKENS))
