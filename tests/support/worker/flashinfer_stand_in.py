"""As much of the package flashinfer as vLLM's backend asks for, in PyTorch.

Its wrappers take the arguments that vLLM plans with and answer what FlashInfer says it
does, so that vLLM's own code around them runs where the package and a GPU are missing.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from support.attention.oracles import plain

VLLM_MODULE = "vllm.v1.attention.backends.flashinfer"
OUR_MODULE = "vllm_kvpolicy.worker.backends.flashinfer"


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
