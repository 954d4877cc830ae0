"""The last similar key against a matrix of all cosines, and within its memory."""

import pytest
import torch

from vllm_kvpolicy.kernels import last_similar as module
from vllm_kvpolicy.kernels.last_similar import last_similar


def unit_keys(rows: int, tokens: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, tokens, size, generator=generator)
    return keys / keys.norm(dim=-1, keepdim=True)


def by_loops(
    unit: torch.Tensor, threshold: float
) -> tuple[list[list[int]], list[list[float]]]:
    cosines = (unit.double() @ unit.double().mT).tolist()
    last, found = [], []
    for row in cosines:
        for i in range(len(row)):
            row[i][i] = 0.0
        similar = [
            max((j for j, c in enumerate(line) if c > threshold), default=0)
            for line in row
        ]
        last.append(similar)
        found.append([line[j] for line, j in zip(row, similar, strict=True)])
    return last, found


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_equals_loops(tokens: int, threshold: float) -> None:
    unit = unit_keys(3, tokens, 4, seed=tokens)
    last, cosine = last_similar(unit, threshold)
    want_last, want_cosine = by_loops(unit, threshold)
    assert last.dtype == torch.int64 and last.tolist() == want_last
    torch.testing.assert_close(cosine, torch.tensor(want_cosine))


def test_equal_keys_point_at_the_last_and_the_last_at_the_one_before() -> None:
    unit = torch.tensor([1.0, 0.0]).expand(1, 5, 2)
    last, cosine = last_similar(unit, 0.5)
    assert last.tolist() == [[4, 4, 4, 4, 3]]
    assert (cosine == 1).all()


def test_a_key_like_no_other_points_at_the_first() -> None:
    unit = torch.eye(4)[None]
    unit[0, 3] = torch.tensor([-0.6, 0.0, 0.0, 0.8])
    last, cosine = last_similar(unit, 0.5)
    assert last.tolist() == [[0, 0, 0, 0]]
    torch.testing.assert_close(cosine, torch.tensor([[0.0, 0.0, 0.0, -0.6]]))


def test_zeros_are_padding() -> None:
    unit = unit_keys(2, 20, 4, seed=0)
    padded = torch.nn.functional.pad(unit, (0, 0, 0, 9))
    for short, long in zip(
        last_similar(unit, 0.3), last_similar(padded, 0.3), strict=True
    ):
        torch.testing.assert_close(long[:, :20], short)
        assert (long[:, 20:] == 0).all()


@pytest.mark.parametrize("tile_tokens", [1, 7, 50])
def test_tiles_do_not_show(monkeypatch: pytest.MonkeyPatch, tile_tokens: int) -> None:
    unit = unit_keys(2, 50, 4, seed=1)
    want = last_similar(unit, 0.5)
    monkeypatch.setattr(module, "TILE_BYTES", 4 * 2 * 50 * tile_tokens)
    for got, expected in zip(last_similar(unit, 0.5), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_no_tensor_holds_all_cosines() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    unit = unit_keys(8, 3000, 2, seed=2)
    with Watch():
        last_similar(unit, 0.5)
    assert 0 < 4 * largest <= module.TILE_BYTES
    assert largest < 8 * 3000**2 / 4
