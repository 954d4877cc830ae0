"""Which implementation runs: by device, by table, by demand, by force; counted."""

import inspect
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced
from vllm_kvpolicy import compat, kernels
from vllm_kvpolicy.kernels import cpu, cuda, dispatch, libraries, preferences
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.libraries import CPU, CUDA
from vllm_kvpolicy.kernels.paged import PagedTokens


def double_ref(values: torch.Tensor, times: int = 1) -> torch.Tensor:
    """Double."""
    return values * 2 * times


def triple_ref(values: torch.Tensor) -> torch.Tensor:
    """Triple."""
    return values * 3


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Twins of `double` in made-up modules; the names that were imported."""
    asked: list[str] = []

    def load(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(
            double=lambda values, times=1: values * 0 - times,
            triple=lambda values: values * 0 - 1,
        )

    monkeypatch.setattr(dispatch, "import_module", load)
    in_cpp = dict.fromkeys(("cuda", "cpu"), ("double",))
    monkeypatch.setattr(preferences, "IN_CPP", in_cpp)
    return asked


@pytest.fixture(autouse=True)
def demand(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets KVPOLICY_KERNELS as a fresh process would find it."""

    def set_demand(value: str | None) -> None:
        monkeypatch.delenv(compat.KERNELS_VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(compat.KERNELS_VARIABLE, value)
        preferences.demanded.cache_clear()

    set_demand(None)
    yield set_demand
    preferences.demanded.cache_clear()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch):
    """Return a function that says whether the twins in C++ for the CPU are there."""

    def set_built(is_built: bool) -> None:
        monkeypatch.setattr(libraries, "_loaded", {CPU.path})
        if not is_built:
            monkeypatch.setattr(CPU, "path", Path("none.so"))
        preferences.why_not_in_cpp.cache_clear()

    yield set_built
    preferences.why_not_in_cpp.cache_clear()


def test_a_cpu_runs_cpp_where_it_was_built(modules: list[str], built) -> None:
    built(True)
    double, triple = Operation(double_ref), Operation(triple_ref)
    assert double(torch.tensor(3), times=2) == -2 and double.calls == {"cpu": 1}
    assert modules == ["vllm_kvpolicy.kernels.cpu"]
    assert triple(torch.tensor(3)) == 9, "it has no such twin"


def test_a_cpu_runs_the_reference(modules: list[str], built) -> None:
    built(False)
    double = Operation(double_ref)
    assert double(torch.tensor(3), times=2) == 12 and double.__doc__ == "Double."
    assert (double.name, double.calls, modules) == ("double", {"reference": 1}, [])


@pytest.mark.parametrize("demanded", [None, *preferences.IMPLEMENTATIONS])
def test_a_demand_for_another_keeps_a_cpu_from_cpp(
    modules, built, demand, demanded
) -> None:
    built(True)
    demand(demanded)
    double = Operation(double_ref)
    double(torch.tensor(3))
    is_wanted = demanded in (None, "cpu")
    assert double.calls == {"cpu" if is_wanted else "reference": 1}


def run_on_gpu(operation: Operation) -> dict[str, int]:
    """Return the calls of an operation after one more on what stands in for a GPU."""
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(TypeError):  # what stands in for a tensor cannot be multiplied
        operation(on_gpu)
    return dict(operation.calls)


def test_a_gpu_runs_triton(modules) -> None:
    assert run_on_gpu(Operation(double_ref)) == {"triton": 1}
    assert modules == ["vllm_kvpolicy.kernels.triton.test_dispatch"]


@pytest.mark.parametrize("demanded", ["reference", "triton", "cuda"])
def test_a_demand_wins_on_a_gpu(modules, demand, demanded) -> None:
    demand(demanded)
    both, one = Operation(double_ref), Operation(triple_ref)
    assert run_on_gpu(both) == {demanded: 1}
    without_twin = "triton" if demanded == "cuda" else demanded
    assert run_on_gpu(one) == {without_twin: 1}


@pytest.mark.parametrize(
    ("demanded", "platform", "reason"),
    [
        ("fast", "cuda", ": got 'fast', expected one of reference,"),
        ("triton", "cpu", "=triton: needs an NVIDIA GPU"),
        ("cuda", "cpu", "=cuda: needs an NVIDIA GPU"),
        ("cpu", "cuda", "=cpu: needs a CPU, got platform cuda"),
    ],
)
def test_demands_that_cannot_be_met_are_refused(
    demand, demanded, platform, reason
) -> None:
    demand(demanded)
    (said,) = preferences.unmet_demands(platform)
    assert said.startswith(f"KVPOLICY_KERNELS{reason}")


@pytest.mark.parametrize(("demanded", "library"), [("cuda", CUDA), ("cpu", CPU)])
def test_a_demand_for_kernels_that_were_not_built_is_refused(
    demand, monkeypatch, tmp_path, demanded, library
) -> None:
    monkeypatch.setattr(library, "path", tmp_path / "none.so")
    demand(demanded)
    (reason,) = preferences.unmet_demands(demanded)
    said = f"KVPOLICY_KERNELS={demanded}: vllm-kvpolicy was built without"
    assert reason.startswith(said)


def test_a_demand_for_triton_is_refused_where_it_is_not_installed(
    demand, monkeypatch
) -> None:
    monkeypatch.setattr(preferences, "find_spec", lambda name: None)
    demand("triton")
    (reason,) = preferences.unmet_demands("cuda")
    assert reason.startswith("KVPOLICY_KERNELS=triton: Triton is not installed")


def test_demands_that_can_be_met_are_not_refused(demand, monkeypatch) -> None:
    monkeypatch.setattr(libraries, "_loaded", {CPU.path, CUDA.path})
    monkeypatch.setattr(preferences, "find_spec", lambda name: SimpleNamespace())
    for value in (None, "reference", "triton", "cuda"):
        demand(value)
        assert preferences.unmet_demands("cuda") == []
    for value in (None, "reference", "cpu"):
        demand(value)
        assert preferences.unmet_demands("cpu") == []


def test_the_line_names_every_operation(demand, built) -> None:
    count = len(preferences.OPERATIONS)
    built(True)
    in_cpp, in_pytorch = preferences.summary("cpu").split("; ")
    assert in_cpp.startswith("C++ for ") and "window_usage" in in_cpp
    assert in_pytorch.startswith("PyTorch for assign_pages")
    demand("reference")
    assert preferences.summary("cpu") == f"PyTorch for all {count} operations"
    demand(None)
    built(False)
    said = f"PyTorch for all {count} operations; vllm-kvpolicy was built without CPU"
    assert preferences.summary("cpu").startswith(said)
    assert preferences.summary("cuda") == f"Triton for all {count} operations"
    demand("cuda")
    in_cuda, in_triton = preferences.summary("cuda").split("; ")
    assert in_cuda == "CUDA C++ for compact_pages, page_tables"
    assert in_triton.startswith("Triton for assign_pages, best_pages, count_in_pages")
    names = f"{in_cuda}, {in_triton}".replace("Triton for", "").replace(",", "").split()
    assert set(preferences.OPERATIONS) <= set(names)


def operations() -> dict[str, Operation]:
    """Return all operations of the package."""
    found = {}
    for stem in iter_modules(kernels.__path__):
        module = import_module(f"vllm_kvpolicy.kernels.{stem.name}")
        found |= {
            value.name: value
            for value in vars(module).values()
            if isinstance(value, Operation)
        }
    return found


def parameters(function: object) -> list[tuple[str, object]]:
    """Return the names and defaults of what a function takes."""
    given = inspect.signature(function).parameters.values()
    return [(each.name, each.default) for each in given]


@pytest.mark.parametrize("name", preferences.OPERATIONS)
def test_a_twin_takes_what_its_reference_takes(name: str) -> None:
    operation = operations()[name]
    for which in preferences.IMPLEMENTATIONS[1:]:
        if preferences.has(name, which):
            twin = operation.implementation(which)
            home = f"triton.{operation.stem}" if which == "triton" else which
            assert parameters(twin) == parameters(operation.reference)
            assert twin.__module__ == f"vllm_kvpolicy.kernels.{home}"


def test_the_table_names_every_operation_and_no_more() -> None:
    found = operations()
    assert set(found) == set(preferences.OPERATIONS)
    for which, module in (("cuda", cuda), ("cpu", cpu)):
        assert set(preferences.IN_CPP[which]) == {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
            if name in found
        }


def test_force_wins_where_there_is_such_a_twin(modules: list[str], built) -> None:
    both, one = Operation(double_ref), Operation(triple_ref)
    with forced("triton"):
        assert both(torch.tensor(3)) == -1
    with forced("cuda"):
        assert both(torch.tensor(3), times=4) == -4
        assert one(torch.tensor(3)) == 9, "no such twin, so the reference"
    with forced("cpu"):
        assert both(torch.tensor(3)) == -1 and one(torch.tensor(3)) == 9
    built(False)
    assert both(torch.tensor(3)) == 6, "the force ends"
    assert both.calls == {"triton": 1, "cuda": 1, "cpu": 1, "reference": 1}
    with pytest.raises(ValueError, match="which: expected one of"), forced("fast"):
        pass


def test_an_operation_without_a_tensor_is_an_error(modules: list[str]) -> None:
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
