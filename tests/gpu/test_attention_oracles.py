"""The scenes and oracles of attention, on a CPU: vLLM's CPU kernels over our tables."""

import importlib.util
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.check.runner import Checks
from support.attention import oracles
from support.attention.oracles import (
    agree,
    by_request,
    judge,
    others,
    page_lists,
    plain,
)
from support.attention.scene import Scene, Shape, requests
from support.engine_configs import engine_args
from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.worker.backends.cpu import KVPolicyCPUBackend

SHAPE = Shape(heads=2, group=2, dim=32, block=32, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> Any:
    if torch.cuda.is_available():
        pytest.skip("vLLM's build for GPUs has no attention for CPUs")
    return engine_args(tiny_model).create_engine_config()


def make(config: Any, queries: int = 1, seed: int = 0) -> Scene:
    batch = requests(Random(seed), SHAPE.block, 400, queries)
    return Scene(KVPolicyCPUBackend, config, SHAPE, batch, CPU, seed)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("seed", range(3))
def test_paged_attention_is_float32_on_what_heads_hold(
    config: Any, queries: int, seed: int
) -> None:
    before = sum(compact_pages.calls.values())
    scene = make(config, queries, seed)
    cut = [request for request in scene.batch if request.frontier]
    assert sum(compact_pages.calls.values()) - before == 2 * len(cut) == 10
    found = scene.attend()
    assert found.isfinite().all()
    verdict = judge(scene, found)
    assert verdict.allowed == oracles.FLOOR  # PyTorch is float32 as well
    verdict.check()


@pytest.mark.parametrize("mistake", ["table", "length", "token"])
def test_a_mistake_is_found(config: Any, mistake: str) -> None:
    scene = make(config)
    judge(scene, scene.attend()).check()
    if mistake == "table":
        scene.tables[3, [0, 1]] = scene.tables[3, [1, 2]]
    elif mistake == "length":
        scene.lengths[4] -= 1
    else:
        page = scene.pool.own_pages(scene.tables[3:4, :1].long())[0, 0, 1, 0]
        scene.pool.values[0][page, 5] += 1
    with pytest.raises(AssertionError, match="allowed"):
        judge(scene, scene.attend()).check()


def test_plain_attention_equals_loops() -> None:
    draws = torch.Generator().manual_seed(3)
    query = torch.randn(3, 4, 8, generator=draws)
    keys, values = torch.randn(2, 7, 2, 8, generator=draws)
    found = plain(query, keys, values, 0.3)
    for token in range(3):
        for head in range(4):
            seen = slice(7 - 2 + token)
            weights = (keys[seen, head // 2] @ query[token, head] * 0.3).softmax(0)
            want = weights @ values[seen, head // 2]
            torch.testing.assert_close(found[token, head], want)


def test_what_half_precision_may_change(config: Any) -> None:
    scene = make(config)
    exact = scene.attend()
    scene.shape = Shape(2, 2, 32, 32, torch.bfloat16)
    scene.held = [(k.bfloat16(), v.bfloat16()) for k, v in scene.held]
    scene.query = scene.query.bfloat16()
    verdict = judge(scene, exact)
    assert 1e-3 < verdict.allowed < 0.1
    judge(scene, by_request(scene, plain, torch.bfloat16)).check()
    with pytest.raises(AssertionError, match="allowed"):
        judge(scene, exact + 2 * verdict.allowed).check()


# -- other packages --------------------------------------------------------------------


class FlashInfer:
    """Decodes as FlashInfer's wrapper says it does, from the same arguments."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and layout == "HND"

    def plan(
        self, first: Any, pages: Any, last: Any, *sizes: int, **types: Any
    ) -> None:
        for part in (first, pages, last):
            assert part.dtype == torch.int32
        assert sizes == (4, 2, 32, 32)
        assert types["q_data_type"] == types["kv_data_type"] == torch.float32
        self.first, self.pages, self.last = first.tolist(), pages, last.tolist()
        self.scale = types["sm_scale"]

    def run(self, query: torch.Tensor, cache: Any) -> torch.Tensor:
        rows = []
        for row, last in enumerate(self.last):
            pages = self.pages[self.first[row] : self.first[row + 1]].long()
            length = (len(pages) - 1) * 32 + last
            tokens = (part[pages].transpose(1, 2).flatten(0, 1) for part in cache)
            keys, values = (part[:length] for part in tokens)
            rows.append(plain(query[row : row + 1], keys, values, self.scale))
        return torch.cat(rows)


def head_major(scene: Scene) -> Scene:
    """Give a scene's cache the order that kernels of GPUs read."""
    halves = scene.cache.flatten(2).split(SHAPE.block * SHAPE.dim, dim=-1)
    keys = halves[0].unflatten(-1, (SHAPE.dim, SHAPE.block)).transpose(-1, -2)
    values = halves[1].unflatten(-1, (SHAPE.block, SHAPE.dim))
    scene.cache = torch.cat([keys, values], dim=-1)
    return scene


@pytest.mark.parametrize("queries", [1, 9])
def test_flashinfer_is_asked_about_the_same_pages(config: Any, queries: int) -> None:
    library = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FlashInfer)
    scene = make(config, queries)
    ours = scene.attend()
    found = oracles.flashinfer(head_major(scene), library)
    assert len(found) == (7 if queries == 1 else 5)
    judge(scene, found).check()
    torch.testing.assert_close(found, ours[: len(found)], rtol=0, atol=2e-5)
    lists = page_lists(scene)
    assert len(lists.pages) == lists.first[-1] and lists.last.min() > 0


def test_agreement_is_three_sided(config: Any) -> None:
    scene = make(config)
    ours = scene.attend()
    notes = agree(scene, ours[:5])
    assert notes[0].startswith("theirs off by") and notes[1] == "apart 0.0e+00"
    with pytest.raises(AssertionError, match="allowed"):
        agree(scene, ours + 1)
    with pytest.raises(AssertionError, match="allowed"):
        agree(scene, torch.full_like(ours, torch.nan))


def test_what_is_missing_is_said(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the table of `make gpu-check`, on a machine without the extras."""
    from contextlib import nullcontext

    def scene_of(name: str, queries: int = 1, seed: int = 0) -> Scene:
        assert name in compat.GPU_BACKENDS
        return make(config, 9 if queries > 1 else 1, seed)

    monkeypatch.setattr(oracles, "gpu_scenes", lambda dtype: nullcontext(scene_of))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checks = Checks("attention", tmp_path / "lines")
    oracles.check_on_gpu(checks)
    text = checks.path.read_text()
    # Of each dtype; FlashInfer's own backend lacks its library.
    asked = 2 * (len(compat.GPU_BACKENDS) - 1)
    assert text.count('"ok": true') == 4 * asked + 4
    assert text.count("NOT RUN: flashinfer is not installed") == asked + 4
    assert text.count("NOT RUN: xformers is not installed") == asked
    assert text.count("off by") == 2 * asked * len(oracles.SEEDS)
    assert set(others(make(config))) == {"flashinfer", "xformers"}
