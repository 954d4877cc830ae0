"""The V2 model runner under Triton's interpreter: hooks, tables and events fit it.

The runner and the attention kernels that a GPU uses, eager and synchronous; CUDA
graphs, asynchronous scheduling and vLLM's choice of backend are not part of this, but
`ams-tova` runs as if its attention were replayed: always from the same tensors.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cpu import needs_float8
from support.programs import run_program

MIN_EVENTS = 3
TRACED = ("ams-tova", "hard-snapkv")
# Interpreted kernels: over two minutes on a quiet machine.
pytestmark = pytest.mark.timeout(1800)


def event_of(trace: dict[str, Any]) -> tuple[str, int]:
    return str(trace["request_id"]).split("-")[0], int(trace["position"])


def run(runner: str, model: Path, folder: Path, extent: list[str]) -> dict[str, Any]:
    """Run the program and return what it wrote, with the traces of TRACED."""
    output, traces = folder / f"{runner}.json", folder / runner
    words = runner, model, traces, output, *extent
    run_program("support.engine.run_policies", *words, seconds=1500)
    result = json.loads(output.read_text())
    for name in TRACED:
        result[name]["traces"] = traces_in(traces, name)
    if "fp8" in result:
        result["fp8"]["traces"] = traces_in(folder / f"{runner}-fp8", "ams-tova")
    return result


def traces_in(folder: Path, policy: str) -> list[dict[str, Any]]:
    found = [dict(np.load(path)) for path in sorted(folder.rglob("*.npz"))]
    return [trace for trace in found if str(trace["policy"]) == policy]


@pytest.fixture(scope="module")
def extent(request: pytest.FixtureRequest) -> list[str]:
    """What slow tests need as well, where some were chosen."""
    chosen = [item for item in request.session.items if item.path == request.path]
    return ["all"] if any(item.get_closest_marker("slow") for item in chosen) else []


@pytest.fixture(scope="module")
def v2(tiny_model: Path, tmp_path_factory: Any, extent: list[str]) -> dict[str, Any]:
    """What the V2 runner did."""
    return run("v2", tiny_model, tmp_path_factory.mktemp("v2"), extent)


@pytest.fixture(scope="module")
def v1(tiny_model: Path, tmp_path_factory: Any, extent: list[str]) -> dict[str, Any]:
    """What the V1 runner did with the CPU kernels."""
    return run("v1", tiny_model, tmp_path_factory.mktemp("v1"), extent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tables"), [("identity", "physical"), ("ragged identity", "folded")]
)
def test_identity_is_stock_token_for_token(
    v2: dict[str, Any], name: str, tables: str
) -> None:
    """Tokens move between pages and superblocks, and heads, and nobody notices."""
    assert v2[name]["events"] >= MIN_EVENTS
    assert v2[name][tables] > 0, "our builder never replaced a table"
    assert v2[name]["tokens"] == v2["stock"]


@needs_float8
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 identity", "fp8 ragged identity"])
def test_identity_over_an_fp8_cache_is_stock(v2: dict[str, Any], name: str) -> None:
    assert v2[name]["events"] >= MIN_EVENTS
    assert v2[name]["tokens"] == v2["fp8 stock"]


@needs_float8
def test_over_an_fp8_cache_about_the_same_is_kept(
    v1: dict[str, Any], v2: dict[str, Any]
) -> None:
    """vLLM's kernel for CPUs cuts numbers off where Triton's rounds them.

    Queries read from the wrong rows keep half of the tokens at most.
    """
    traces = [
        {event_of(trace): trace["selected"] for trace in found["fp8"]["traces"]}
        for found in (v1, v2)
    ]
    assert traces[0].keys() == traces[1].keys() and len(traces[0]) >= MIN_EVENTS
    for event, selected in traces[0].items():
        other = traces[1][event]
        common = [
            np.isin(one, two).mean()
            for one, two in zip(
                selected.reshape(-1, selected.shape[-1]),
                other.reshape(-1, other.shape[-1]),
                strict=True,
            )
        ]
        assert np.mean(common) > 0.85, (event, common)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infinite", "on call"])
def test_what_never_cuts_is_stock_token_for_token(
    v2: dict[str, Any], name: str
) -> None:
    """Our builder runs and leaves the metadata alone."""
    assert v2[name]["builds"] > 0
    assert (v2[name]["events"], v2[name]["physical"]) == (0, 0)
    assert v2[name]["tokens"] == v2["stock"]


@pytest.mark.parametrize(
    ("name", "tables"), [("ams-tova", "physical"), ("hard-snapkv", "folded")]
)
def test_policy_keeps_what_it_keeps_on_the_v1_runner(
    v1: dict[str, Any], v2: dict[str, Any], name: str, tables: str
) -> None:
    """Query windows and survivors do not depend on runner and attention kernel."""
    one, other = v1[name], v2[name]
    assert other["events"] == one["events"] >= MIN_EVENTS
    assert other[tables] > 0
    assert len(one["traces"]) == len(other["traces"]) == other["events"]

    for left, right in zip(
        sorted(one["traces"], key=event_of),
        sorted(other["traces"], key=event_of),
        strict=True,
    ):
        assert event_of(left) == event_of(right)
        np.testing.assert_array_equal(left["selected"], right["selected"])
        np.testing.assert_array_equal(left["survivors"], right["survivors"])
    assert other["tokens"] == one["tokens"]


def test_as_if_captured_our_tables_are_always_read(v2: dict[str, Any]) -> None:
    """With own lengths in every step that a graph may replay: one token a request."""
    assert v2["ams-tova"]["physical"] == v2["ams-tova"]["builds"] > 0
    # Requests decode together, but for the steps that read prompts.
    ran = v2["hard-snapkv"]
    assert ran["builds"] > ran["folded"] > ran["builds"] // 2


def test_signals_are_those_of_the_v1_runner(
    v1: dict[str, Any], v2: dict[str, Any]
) -> None:
    """EpiKV's: every token of every request, prompts in chunks, neighbours beside."""
    assert v1["ams-tova"]["tokens"] == v2["ams-tova"]["tokens"]
    assert len(v1["signals"]) == 2 and v1["signals"].keys() == v2["signals"].keys()
    for request, rows in v1["signals"].items():
        want, got = np.array(rows), np.array(v2["signals"][request])
        assert want.shape == got.shape and want.shape[0] == 2
        assert want.shape[1] > 60 and want[:, 1:].std() > 0.01
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ams-tova", "hard-snapkv"])
def test_prompts_from_the_cache_give_the_same_answers(
    v1: dict[str, Any], v2: dict[str, Any], name: str
) -> None:
    """The second request begins with the block that the first computes."""
    for runner in (v1, v2):
        found = runner[f"{name} shared"]
        assert found["hits"][:2] == [0, 32]
        assert found["tokens"] == found["cold"] and found["events"] >= MIN_EVENTS
    assert v1[f"{name} shared"]["tokens"] == v2[f"{name} shared"]["tokens"]
