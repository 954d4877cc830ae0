"""FlashInfer with a policy: vLLM's builder and forward pass, stand-in kernels.

The stand-ins' wrappers take the arguments that vLLM plans with and answer what
FlashInfer says it does, so that vLLM's own code around them runs where the package and
a GPU are missing.
"""

import sys
from importlib import import_module
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from support.attention.oracles import judge, plain
from support.attention.scene import Request, Scene, Shape, requests
from support.engine_configs import engine_args
from vllm_kvpolicy.worker.backends.mixins import WholeRowsMixin

VLLM_MODULE = "vllm.v1.attention.backends.flashinfer"
OUR_MODULE = "vllm_kvpolicy.worker.backends.flashinfer"
SHAPE = Shape(heads=2, group=2, dim=64, block=16, dtype=torch.float32)


class Wrapper:
    """Paged attention of requests with any number of queries."""

    plans: list[dict[str, Any]] = []

    def __init__(self, workspace: Any, layout: str, **options: Any) -> None:
        assert layout == "HND"
        self.is_cuda_graph_enabled = False

    def plan(self, **given: Any) -> None:
        """Take what a step plans with; all of it lies on the host but the pages."""
        type(self).plans.append(given)
        first = given.get("indptr", given.get("paged_kv_indptr"))
        pages = given.get("indices", given.get("paged_kv_indices"))
        last = given.get("last_page_len", given.get("paged_kv_last_page_len"))
        starts = given.get("qo_indptr", torch.arange(len(last) + 1))
        self.size, self.pages = given["page_size"], pages
        self.first, self.last = first.tolist(), last.tolist()
        self.starts = [start - int(starts[0]) for start in starts.tolist()]
        self._window_left = given["window_left"]
        self._logits_soft_cap = given["logits_soft_cap"] or 0.0
        self._sm_scale, self._causal = given["sm_scale"], given.get("causal", True)

    def run(self, query: torch.Tensor, cache: Any, out: Any, **scales: Any) -> None:
        """Attend request by request."""
        for row, last in enumerate(self.last):
            pages = self.pages[self.first[row] : self.first[row + 1]]
            length = (len(pages) - 1) * self.size + last
            mine = slice(self.starts[row], self.starts[row + 1])
            out[mine] = attend(query[mine], cache, pages, length, self._sm_scale)


class Decode(Wrapper):
    """BatchDecodeWithPagedKVCacheWrapper."""


class Prefill(Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper."""


def attend(
    query: torch.Tensor, cache: Any, pages: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    """Return [m, H * G, D] over the pages of one request."""
    keys, values = (
        part[pages.long()].transpose(1, 2).flatten(0, 1)[:length] for part in cache
    )
    return plain(query, keys, values, scale)


def xqa(**given: Any) -> None:
    """Decode from tables and lengths on the device, as FlashInfer's XQA kernel."""
    tables, lengths = given["block_tables"], given["seq_lens"].tolist()
    size = given["kv_cache"][0].shape[2]
    for row, length in enumerate(lengths):
        query, pages = given["query"][row : row + 1], tables[row, : -(-length // size)]
        found = attend(query, given["kv_cache"], pages, length, given["bmm1_scale"])
        given["out"][row] = found[0]


class CopyPages:
    """vLLM's kernel that puts page lists one behind the other."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return what stands for a launch."""
        return self._copy

    def _copy(
        self, pages: Any, table: Any, stride: int, first: Any, BLOCK_SIZE: int
    ) -> None:
        assert table.stride(0) == stride
        for row, (start, end) in enumerate(zip(first[:-1], first[1:], strict=True)):
            pages[start:end] = table[row, : end - start]


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the stand-in where the package would be; return our backend's class.

    vLLM's module and ours are imported anew, and forgotten when the test ends.
    """
    Wrapper.plans.clear()
    package = ModuleType("flashinfer")
    names = {
        "flashinfer": {
            "BatchAttentionWithAttentionSinkWrapper": type("Sinks", (), {}),
            "BatchDecodeWithPagedKVCacheWrapper": Decode,
            "BatchPrefillWithPagedKVCacheWrapper": Prefill,
            "BatchPrefillWithRaggedKVCacheWrapper": type("Ragged", (), {}),
            "get_seq_lens": lambda first, last, size: first.diff() * size - size + last,
            "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": None,
        },
        "flashinfer.decode": {
            "fast_decode_plan": None,
            "trtllm_batch_decode_with_kv_cache": None,
        },
        "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache": None},
        "flashinfer.utils": {"FP4Tensor": type("FP4Tensor", (), {})},
    }
    for name, values in names.items():
        module = package if name == "flashinfer" else ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in (VLLM_MODULE, OUR_MODULE):
        # Undone at the end of the test, whichever was there before.
        monkeypatch.setitem(sys.modules, name, package)
        del sys.modules[name]
    backend = import_module(OUR_MODULE).KVPolicyFlashInferBackend
    stock = sys.modules[VLLM_MODULE]
    monkeypatch.setattr(stock, "_copy_page_indices_kernel", CopyPages())
    monkeypatch.setattr(stock, "pin_host_range_buf", lambda size: None)
    monkeypatch.setattr(stock, "trtllm_workspace_buffer", torch.zeros(1))
    monkeypatch.setattr(stock, "flashinfer_xqa_batch_decode_with_kv_cache", xqa)
    return backend


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = install(monkeypatch)
    monkeypatch.setattr(found.get_impl_cls(), "do_kv_cache_update", write)
    return found


@pytest.fixture
def config(tiny_model: Path) -> Any:
    config = engine_args(tiny_model).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def write(self: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """Stand in for vLLM's CUDA kernel that writes the cache."""
    both = torch.cat([key, value], dim=-1)
    cache[slots // SHAPE.block, :, slots % SHAPE.block] = both


def make(backend: Any, config: Any, batch: list[Request], seed: int = 0) -> Scene:
    return Scene(backend, config, SHAPE, batch, torch.device("cpu"), seed)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("seed", range(3))
def test_steps_are_planned_on_what_requests_hold(
    backend: Any, config: Any, queries: int, seed: int
) -> None:
    batch = requests(Random(seed), SHAPE.block, 300, queries)
    scene = make(backend, config, batch, seed)
    judge(scene, scene.attend()).check()
    kinds = [sorted(plan) for plan in Wrapper.plans]
    assert len(kinds) == (1 if queries == 1 else 2)
    planned = torch.cat([plan["seq_lens"] for plan in reversed(Wrapper.plans)])
    assert planned.tolist() == scene.lengths.tolist()  # the device's, to the token
    assert planned.tolist() == [len(keys) for keys, _ in scene.held]


def test_a_bound_that_is_not_exact_is_found(backend: Any, config: Any) -> None:
    """FlashInfer reads as many tokens as the host says: why drafts stay refused."""
    scene = make(backend, config, requests(Random(1), SHAPE.block, 300, 1))
    scene.held = [(keys[:-1], values[:-1]) for keys, values in scene.held[1:]]
    scene.held = [make(backend, config, [Request(1)]).held[0], *scene.held]
    found = scene.attend()
    full = make(backend, config, scene.batch)
    with pytest.raises(AssertionError, match="allowed"):
        judge(full, found).check()


def test_decode_kernels_get_tables_in_one_piece(
    backend: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XQA, which compute capability 9 decodes with: vLLM refuses other tables."""
    stock = sys.modules[VLLM_MODULE]
    monkeypatch.setattr(stock, "can_use_trtllm_attention", lambda *a, **k: True)
    monkeypatch.setattr(stock, "use_trtllm_attention", lambda *a, **k: False)
    monkeypatch.setattr(
        stock.FlashInferMetadataBuilder,
        "_get_flashinfer_trtllm_api_decode_kernel",
        staticmethod(lambda: stock.FlashInferDecodeKernel.XQA),
    )
    scene = make(backend, config, requests(Random(2), SHAPE.block, 300, 1))
    assert not scene.tables.is_contiguous()
    judge(scene, scene.attend()).check()
    assert not Wrapper.plans
    whole = backend.get_builder_cls().__mro__[2]
    assert whole is WholeRowsMixin
    monkeypatch.setattr(whole, "build", stock.FlashInferMetadataBuilder.build)
    with pytest.raises(AssertionError) as error:
        scene.attend()
    assert "block_tables_decode" in str(error.traceback[-1].statement)


def test_tables_keep_their_place() -> None:
    """A captured graph reads where its tables were."""
    seen = []

    class Stock:
        def build(self, prefix: int, common: Any, fast_build: bool = False) -> None:
            seen.append(common.block_table_tensor)

    class Builder(WholeRowsMixin, Stock):
        pass

    buffer = torch.arange(12, dtype=torch.int32).view(3, 4)
    for tables in (buffer, buffer[:2, :3], buffer[:1, :1]):
        common = SimpleNamespace(block_table_tensor=tables)
        common.replace = lambda **changes: SimpleNamespace(**changes)
        Builder().build(0, common)
    assert [len(tables) for tables in seen] == [3, 2, 1]
    for tables in seen:
        assert tables.is_contiguous() and tables.data_ptr() == buffer.data_ptr()
        assert torch.equal(tables, buffer[: len(tables)])


@pytest.mark.parametrize(
    ("block_size", "reason"),
    [(16, None), (None, None), (64, None), (128, "--block-size above 64")],
)
def test_what_it_cannot_do_is_said(
    backend: Any, config: Any, block_size: Any, reason: Any
) -> None:
    from vllm.config import set_current_vllm_config

    asked = (64, torch.bfloat16, "auto", block_size, *[False] * 4)
    capability = SimpleNamespace(major=9)
    with set_current_vllm_config(config):
        found = backend.supports_combination(*asked, capability)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found
