"""Heads of their own lengths, on a CPU: vLLM's CPU kernels over folded tables."""

from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.gpu.check.runner import Checks
from support.attention import folded_oracles
from support.attention.folded_oracles import by_head, judge, replay
from support.attention.folded_scene import FoldedScene
from support.attention.oracles import FLOOR, plain
from support.attention.scene import POISON, Shape, requests
from support.engine_configs import engine_args
from vllm_kvpolicy import compat
from vllm_kvpolicy.worker.backends.cpu import KVPolicyCPUBackend

SHAPE = Shape(heads=2, group=2, dim=32, block=32, dtype=torch.float32)
CPU = torch.device("cpu")
NUMBER = 3  # a request that had an event


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> Any:
    if torch.cuda.is_available():
        pytest.skip("vLLM's build for GPUs has no attention for CPUs")
    return engine_args(tiny_model, block_size=SHAPE.block).create_engine_config()


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers prepare for graphs, as they do on GPUs."""
    monkeypatch.setattr(compat, "captures_attention", lambda vllm_config: True)


def make(config: Any, queries: int = 1, padding: int = 0, seed: int = 0) -> FoldedScene:
    batch = requests(Random(seed), SHAPE.block, 400, queries)
    sizes = batch, padding, CPU, seed
    return FoldedScene(KVPolicyCPUBackend, config, SHAPE, *sizes)


@pytest.mark.parametrize("queries, padding", [(1, 0), (1, 3), (9, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_folded_attention_is_float32_on_what_heads_hold(
    config: Any, queries: int, padding: int, seed: int
) -> None:
    scene = make(config, queries, padding, seed)
    found = scene.attend()
    assert found.shape == (2, scene.num_tokens, 4, 32)
    verdict = judge(scene, found)
    assert verdict.allowed == FLOOR  # PyTorch is float32 as well
    verdict.check()


def test_pages_change_layers_and_heads(config: Any) -> None:
    scene = make(config)
    lists = scene.runtime.tier.lists
    requests = scene.runtime.requests
    slot = requests.row_of[str(NUMBER)]
    first = lists.first[slot]
    blocks = requests.global_blocks[slot].long()
    pages = lists.pages[blocks].flatten()[: int(first[-1])]
    split = pages.split(first.diff().tolist())
    layers = [pages // (scene.num_blocks * SHAPE.heads) for pages in split]
    heads = [pages % SHAPE.heads for pages in split]
    assert any((layer != n // 2).any() for n, layer in enumerate(layers))
    assert any((head != n % 2).any() for n, head in enumerate(heads))
    listed = torch.cat(split)
    assert len(listed.unique()) == len(listed)
    assert (scene.cache == POISON).all(-1).any()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("seed", range(2))
def test_a_call_recorded_at_length_one_serves_long_steps(
    config: Any, with_graphs: None, padding: int, seed: int
) -> None:
    scene = make(config, 1, padding, seed)
    rows, columns = scene.runtime.tier.tables.pages.shape[1::2]
    assert rows > len(scene.batch) + padding
    longest = config.model_config.max_model_len
    assert columns == longest // SHAPE.block
    assert scene.build_empty().kv_policy_folded.folded.max_length == longest
    judge(scene, replay(scene)).check()


def test_a_recorded_call_whose_tables_are_not_filled_is_found(
    config: Any, with_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(config)
    monkeypatch.setattr(scene, "build", lambda: None)
    with pytest.raises(AssertionError, match="allowed"):
        judge(scene, replay(scene)).check()


@pytest.mark.parametrize("mistake", ["page", "length", "head", "order"])
def test_a_mistake_is_found(config: Any, mistake: str) -> None:
    scene = make(config, 9 if mistake == "order" else 1)
    judge(scene, scene.attend()).check()
    built, output = scene.build(), scene.output()
    tables = scene.runtime.tier.tables
    if mistake == "page":
        tables.pages[1, NUMBER, :, 0] = tables.pages[1, NUMBER - 1, :, 0]
    elif mistake == "length":
        tables.lengths[0, NUMBER] -= 1
    elif mistake == "head":
        tables.pages[:] = tables.pages.flip(2)
    else:
        order = built.kv_policy_folded.folded.order
        order[:] = order.flip(0)
    scene.forward(built, output)
    with pytest.raises(AssertionError, match="allowed"):
        judge(scene, output[:, : scene.num_tokens]).check()


def test_heads_alone_equal_heads_together(config: Any) -> None:
    """Of a request without an event, all heads hold the same tokens."""
    scene = make(config, 9)
    found = by_head(scene, torch.float32)
    for layer in range(2):
        keys, values = (
            torch.stack([head[side] for head in scene.held[1][layer]], 1)
            for side in (0, 1)
        )
        query = scene.parts(layer)[0][1:2]
        want = plain(query, keys, values, scene.scale)
        torch.testing.assert_close(found[layer, 1:2], want)


def test_rows_of_the_table_of_gpu_check(
    config: Any, tmp_path: Path, with_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene_of(name: str, queries: int = 1, seed: int = 0) -> FoldedScene:
        assert name in compat.GPU_BACKENDS
        return make(config, 9 if queries > 1 else 1, int(queries == 1), seed)

    monkeypatch.setattr(
        folded_oracles, "gpu_scenes", lambda dtype, **changes: nullcontext(scene_of)
    )
    checks = Checks("attention", tmp_path / "lines")
    folded_oracles.check_on_gpu(checks)
    text = checks.path.read_text()
    assert text.count('"ok": true') == text.count("off by") / 3 == 2 * 6
    assert text.count("own lengths, replay") == 2 * 2
