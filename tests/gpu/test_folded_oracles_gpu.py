"""Heads of their own lengths on a GPU: vLLM's kernels, in graphs as well."""

from collections.abc import Iterator

import pytest
import torch

from support.attention.folded_oracles import (
    BACKENDS,
    GRAPHS,
    PROMPT,
    gpu_scenes,
    judge,
    replay,
)

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def make(request: pytest.FixtureRequest) -> Iterator[object]:
    with gpu_scenes(request.param) as make:
        yield make


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def make_with_graphs(request: pytest.FixtureRequest) -> Iterator[object]:
    with gpu_scenes(request.param, **GRAPHS) as make:
        yield make


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("queries", [1, PROMPT], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", BACKENDS)
def test_folded_attention_is_pytorchs(make, name: str, queries: int, seed: int) -> None:
    scene = make(name, queries, seed)
    verdict = judge(scene, scene.attend())
    assert verdict.worst <= verdict.allowed, str(verdict)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BACKENDS)
def test_graphs_captured_at_length_one(make_with_graphs, name: str, seed: int) -> None:
    scene = make_with_graphs(name, seed=seed)
    verdict = judge(scene, replay(scene))
    assert verdict.worst <= verdict.allowed, str(verdict)
