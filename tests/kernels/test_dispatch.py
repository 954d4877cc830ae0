"""Which implementation runs: by device, by force, counted."""

from types import SimpleNamespace

import pytest
import torch

from vllm_kvpolicy.kernels import dispatch
from vllm_kvpolicy.kernels.dispatch import Operation, forced
from vllm_kvpolicy.kernels.paged import PagedTokens


def double_ref(values: torch.Tensor, times: int = 1) -> torch.Tensor:
    """Double."""
    return values * 2 * times


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Twins of `double` in made-up modules; the names that were imported."""
    asked: list[str] = []

    def load(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(double=lambda values, times=1: values * 0 - times)

    monkeypatch.setattr(dispatch, "import_module", load)
    return asked


def test_a_cpu_runs_the_reference(modules: list[str]) -> None:
    double = Operation(double_ref)
    assert double(torch.tensor(3), times=2) == 12 and double.__doc__ == "Double."
    assert (double.name, double.calls, modules) == ("double", {"reference": 1}, [])


def test_a_gpu_runs_triton(modules: list[str]) -> None:
    double = Operation(double_ref)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(TypeError):  # what stands in for a tensor cannot be multiplied
        double(on_gpu)
    assert double.calls == {"triton": 1}
    assert modules == ["vllm_kvpolicy.kernels.triton.test_dispatch"]


def test_force_wins_where_there_is_such_a_twin(modules: list[str]) -> None:
    both, one = Operation(double_ref, in_cuda=True), Operation(double_ref)
    with forced("triton"):
        assert both(torch.tensor(3)) == -1
    with forced("cuda"):
        assert both(torch.tensor(3), times=4) == -4
        assert one(torch.tensor(3)) == 6, "no such twin, so the reference"
    assert both(torch.tensor(3)) == 6, "the force ends"
    assert both.calls == {"triton": 1, "cuda": 1, "reference": 1}
    with pytest.raises(ValueError, match="which: expected one of"), forced("fast"):
        pass


def test_an_operation_without_a_tensor_is_an_error() -> None:
    with pytest.raises(TypeError, match="expected a tensor"):
        Operation(double_ref)(3)


def test_a_plain_tensor_is_pages_of_one_row_each() -> None:
    tokens = torch.arange(2 * 3 * 4 * 5 * 6).view(2, 3, 4, 5, 6)
    paged = PagedTokens.from_dense(tokens)
    assert paged.dense is tokens and paged.shape == tokens.shape
    copied = PagedTokens(paged.pools, paged.pages, paged.num_tokens)
    assert torch.equal(copied.dense, tokens) and copied.device == tokens.device
    short = PagedTokens(paged.pools, paged.pages, 3)
    assert torch.equal(short.dense, tokens[..., :3, :])
