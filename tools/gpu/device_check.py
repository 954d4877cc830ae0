#!/usr/bin/env python3
"""First contact with a GPU machine: versions, libraries, kernels against plain PyTorch.

Each line is one check and its verdict; a failure does not stop the others. Without a
GPU it only checks that the calls fit the operators' schemas; with --rehearse it runs
none and says their names. Status 1 if any failed.
"""

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")

import torch  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float16
TOLERANCE = 0.02
LIBRARIES = (
    "_C_stable_libtorch",
    "vllm_flash_attn._vllm_fa3_C",
    "cumem_allocator",
)
PACKAGES = ("numpy", "transformers", "triton", "numba", "tokenizers", "pydantic")
TOKENS, QUERY_HEADS, HEADS, SIZE, PAGE = 96, 8, 2, 64, 16
WIDTH, SCALE = 512, 0.125


class Data:
    """Random tensors that the checks share, and a cache of scrambled pages."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        options = {"device": DEVICE, "dtype": DTYPE}
        self.x = torch.randn(TOKENS, WIDTH, **options)
        self.weight = torch.rand(WIDTH, **options)
        self.query = torch.randn(TOKENS, QUERY_HEADS, SIZE, **options)
        self.key = torch.randn(TOKENS, HEADS, SIZE, **options)
        self.value = torch.randn(TOKENS, HEADS, SIZE, **options)
        self.one = torch.ones(1, device=DEVICE)
        self.num_pages = TOKENS // PAGE + 2
        order = torch.randperm(self.num_pages, device=DEVICE)
        self.pages = order[: TOKENS // PAGE].int()
        offset = torch.arange(PAGE, device=DEVICE).repeat(TOKENS // PAGE)
        self.slots = self.pages.long().repeat_interleave(PAGE) * PAGE + offset
        self.length = torch.tensor([TOKENS], device=DEVICE, dtype=torch.int32)

    def empty_cache(self) -> list[torch.Tensor]:
        """Return zeros [pages, PAGE, HEADS, SIZE], for keys and for values."""
        shape = self.num_pages, PAGE, HEADS, SIZE
        return [torch.zeros(shape, device=DEVICE, dtype=DTYPE) for _ in range(2)]

    def filled_cache(self) -> list[torch.Tensor]:
        """Return the keys and values on their pages."""
        caches = self.empty_cache()
        for cache, tokens in zip(caches, (self.key, self.value), strict=True):
            cache.view(-1, HEADS, SIZE)[self.slots] = tokens
        return caches

    def attention(self, queries: int) -> dict[str, Any]:
        """Return what both attention kernels take, for the newest queries."""
        key, value = self.filled_cache()
        starts = torch.tensor([0, queries], device=DEVICE, dtype=torch.int32)
        return {
            "q": self.query[-queries:].contiguous(),
            "k": key,
            "v": value,
            "cu_seqlens_q": starts,
            "max_seqlen_q": queries,
            "seqused_k": self.length,
            "max_seqlen_k": TOKENS,
            "softmax_scale": SCALE,
            "causal": True,
            "block_table": self.pages[None].contiguous(),
        }

    def expected(self, queries: int) -> torch.Tensor:
        """Return causal attention of the newest queries."""
        group = QUERY_HEADS // HEADS
        key, value = (
            tokens.repeat_interleave(group, 1).float()
            for tokens in (self.key, self.value)
        )
        query = self.query[-queries:].float()
        logits = torch.einsum("qhd,khd->hqk", query, key) * SCALE
        position = torch.arange(TOKENS, device=DEVICE)
        mask = position > position[-queries:, None]
        weights = logits.masked_fill(mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative where values are above 1."""
    found, expected = found.float(), expected.float()
    return ((found - expected).abs() / (1 + expected.abs())).max().item()


def versions() -> str:
    """Return what is installed."""
    found = [f"python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.import_module(name).__version__}")
        except ImportError as error:
            found.append(f"{name}: {error}")
    return ", ".join(found)


def gpu() -> str:
    """Return what the GPU is."""
    if not GPU:
        return "none"
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return f"{name}, sm_{major}{minor}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB"


def platform() -> str:
    """Return what vLLM takes the machine for."""
    import vllm
    from vllm.platforms import current_platform

    name = type(current_platform).__name__
    if current_platform.is_unspecified():
        raise RuntimeError(f"vLLM {vllm.__version__} finds no platform")
    return f"vLLM {vllm.__version__}, {name}"


def library(name: str) -> str:
    """Load one of vLLM's libraries."""
    importlib.import_module(f"vllm.{name}")
    return "loaded"


def rms_norm(data: Data) -> float:
    """Return the error of vLLM's RMS norm."""
    from vllm import _custom_ops

    out = torch.empty_like(data.x)
    _custom_ops.rms_norm(out, data.x, data.weight, 1e-6)
    x = data.x.float()
    norm = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return distance(out, (x * norm).to(DTYPE) * data.weight)


def silu_and_mul(data: Data) -> float:
    """Return the error of vLLM's gated activation."""
    half = WIDTH // 2
    out = torch.empty(TOKENS, half, device=DEVICE, dtype=DTYPE)
    torch.ops._C.silu_and_mul(out, data.x)
    gate, up = data.x.float().split(half, dim=-1)
    return distance(out, torch.nn.functional.silu(gate) * up)


def cache_write(data: Data, with_triton: bool) -> float:
    """Return the error of writing keys and values to their pages."""
    caches = data.empty_cache()
    if with_triton:
        from vllm.v1.attention.ops import triton_reshape_and_cache_flash as module

        write = module.triton_reshape_and_cache_flash
    else:
        from vllm import _custom_ops

        write = _custom_ops.reshape_and_cache_flash
    write(data.key, data.value, *caches, data.slots, "auto", data.one, data.one)
    return max(map(distance, caches, data.filled_cache()))


def pinned_memory(data: Data) -> bool:
    """Return whether the GPU reads host memory that changes, as the V2 runner does."""
    if not GPU:
        return True
    host = torch.arange(8, dtype=torch.int32).pin_memory()
    view = torch.ops._C.get_cuda_view_from_cpu_tensor(host)
    host[3] = 77
    torch.cuda.synchronize()
    return view.device.type == "cuda" and view.tolist()[3] == 77


def triton_attention(data: Data, queries: int) -> float:
    """Return the error of vLLM's attention in Triton."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    arguments = data.attention(queries)
    out = torch.empty_like(arguments["q"])
    scales = torch.ones(1, HEADS, device=DEVICE)
    unified_attention(
        **arguments,
        out=out,
        window_size=(-1, -1),
        softcap=0.0,
        q_descale=None,
        k_descale=scales,
        v_descale=scales,
    )
    return distance(out, data.expected(queries))


def flash_attention(data: Data, queries: int) -> float:
    """Return the error of FlashAttention 3."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    out = flash_attn_varlen_func(**data.attention(queries), fa_version=3)
    return distance(out, data.expected(queries))


def graph(data: Data) -> float:
    """Return the error of a replayed graph of one of vLLM's operators."""
    if not GPU:
        return 0.0
    out = torch.empty_like(data.x)

    def norm() -> None:
        torch.ops._C.rms_norm(out, data.x, data.weight, 1e-6)

    with torch.cuda.stream(torch.cuda.Stream()):
        norm()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        norm()
    expected = out.clone()
    out.zero_()
    captured.replay()
    torch.cuda.synchronize()
    return distance(out, expected)


def checks(data: Data) -> dict[str, Callable[[], Any]]:
    """Return all checks by name."""
    found: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "gpu": gpu,
        "vllm platform": platform,
    }
    found |= {f"load {name}": partial(library, name) for name in LIBRARIES}
    found |= {
        "_C rms_norm": partial(rms_norm, data),
        "_C silu_and_mul": partial(silu_and_mul, data),
        "_C cache write": partial(cache_write, data, False),
        "_C host memory on the GPU": partial(pinned_memory, data),
        "triton cache write": partial(cache_write, data, True),
    }
    for queries in (TOKENS, 1):
        label = f"{queries} queries"
        found[f"triton attention, {label}"] = partial(triton_attention, data, queries)
        found[f"flash attention 3, {label}"] = partial(flash_attention, data, queries)
    return found | {"graph of a _C operator": partial(graph, data)}


def run(call: Callable[[], Any]) -> tuple[bool, str]:
    """Return whether a check is good, and what to say about it."""
    try:
        answer = call()
    except NotImplementedError as error:
        fits = not GPU and "backend" in str(error)
        return fits, "schema fits (no GPU)" if fits else str(error)
    except Exception as error:
        traceback.print_exc()
        return False, f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    if isinstance(answer, float):
        return answer < TOLERANCE, f"largest difference {answer:.5f}"
    return answer is not False, str(answer)


def main() -> int:
    """Run all checks; return the exit status."""
    if sys.argv[1:] == ["--rehearse"]:
        print("device check:", ", ".join(checks(Data())))
        return 0
    bad = []
    for name, call in checks(Data()).items():
        started = time.time()
        is_good, text = run(call)
        bad += [] if is_good else [name]
        verdict = "ok  " if is_good else "FAIL"
        print(f"{verdict} {name:28} {time.time() - started:6.2f} s  {text}", flush=True)
    print("device check:", f"failed: {', '.join(bad)}" if bad else "all ok", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
