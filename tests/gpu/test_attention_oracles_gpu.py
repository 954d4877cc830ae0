"""Attention over physical tables on a GPU: vLLM's kernels, PyTorch, and others."""

from collections.abc import Iterator

import pytest
import torch

from support.attention.oracles import agree, gpu_scenes, judge, lacking, missing, others
from vllm_kvpolicy import compat

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def make(request: pytest.FixtureRequest) -> Iterator[object]:
    with gpu_scenes(request.param) as make:
        yield make


def backend_or_skip(name: str) -> str:
    """Return a backend's name; skip where this machine lacks its library."""
    if reason := lacking(name):
        pytest.skip(f"{reason}: pip install vllm-kvpolicy[flashinfer]")
    return name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("queries", [1, 70], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", compat.GPU_BACKENDS)
def test_paged_attention_is_pytorchs(make, name: str, queries: int, seed: int) -> None:
    scene = make(backend_or_skip(name), queries, seed)
    verdict = judge(scene, scene.attend())
    assert verdict.worst <= verdict.allowed, str(verdict)


@pytest.mark.parametrize("package", ["flashinfer", "xformers"])
@pytest.mark.parametrize("name", compat.GPU_BACKENDS)
def test_others_agree(make, name: str, package: str) -> None:
    if reason := missing(package):
        pytest.skip(f"{reason}: pip install vllm-kvpolicy[{package}]")
    scene = make(backend_or_skip(name), 70)
    assert agree(scene, others(scene)[package]())
