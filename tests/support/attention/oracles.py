"""Attention by others over the tokens that each head should hold.

PyTorch in float32 says what is right. FlashInfer reads the same pages through the same
tables, xFormers the gathered tokens; both are extras of the package, and what is not
installed is not asked.
"""

import ctypes
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.gpu.models import write_model
from support.attention.scene import Scene, Shape, requests
from vllm_kvpolicy import compat

FLOOR = 2e-5  # what the order of float32 sums may change at these lengths
LONGEST = 2600
DTYPES, SEEDS = ("bfloat16", "float16"), range(3)
WORKSPACE_BYTES = 128 * 2**20
Reference = Callable[[Any, torch.dtype], torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def plain(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return [m, H * G, D] of the last m tokens of a request, in the inputs' type.

    Args:
        query: [m, H * G, D].
        keys: [t, H, D], the queries' own last.
        values: [t, H, D].
        scale: of the scores.
    """
    count, length = len(query), len(keys)
    grouped = query.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("mhgd,thd->hgmt", grouped, keys) * scale
    token = torch.arange(length, device=query.device)
    later = token > token[length - count :, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hgmt,thd->mhgd", weights, values).flatten(1, 2)


def xformers(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the same as `plain`, by xFormers."""
    _load_cuda_12_runtime()
    ops = import_module("xformers.ops")
    group = query.shape[1] // keys.shape[1]
    dense = (part.repeat_interleave(group, 1)[None] for part in (keys, values))
    mask = None
    if len(query) > 1:
        mask = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask()
    inputs = (query[None], *dense)
    return ops.memory_efficient_attention(*inputs, attn_bias=mask, scale=scale)[0]


def _load_cuda_12_runtime() -> None:
    """Load it from where pip puts it: xFormers' wheel is built for CUDA 12."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library in Path(folder).glob("cuda_runtime/lib/libcudart.so.12"):
            ctypes.CDLL(str(library))


def by_request(scene: Scene, attend: Attention, dtype: torch.dtype) -> torch.Tensor:
    """Return [T, H * G, D] of all requests of a scene, one after the other."""
    starts, found = scene.starts(), []
    for number, held in enumerate(scene.held):
        query = scene.query[starts[number] : starts[number + 1]]
        query, keys, values = (part.to(dtype) for part in (query, *held))
        found.append(attend(query, keys, values, scene.scale))
    return torch.cat(found)


@dataclass(frozen=True)
class PageLists:
    """Page lists of the decode requests of a scene, one behind the other.

    Args:
        first: [R + 1] int32, where each list starts and ends.
        pages: [C] int32, superblocks.
        last: [R] int32, tokens on each list's last page.
    """

    first: torch.Tensor
    pages: torch.Tensor
    last: torch.Tensor


def page_lists(scene: Scene) -> PageLists:
    """Return what a scene's tables and lengths say, on its device."""
    size = scene.shape.block
    rows = [n for n, request in enumerate(scene.batch) if request.queries == 1]
    lengths = scene.lengths[rows]
    counts = -(-lengths // size)
    column = torch.arange(scene.tables.shape[1], device=scene.device)
    return PageLists(
        first=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        pages=scene.tables[rows][column < counts[:, None]],
        last=lengths - (counts - 1) * size,
    )


def flashinfer(scene: Scene, library: Any = None) -> torch.Tensor:
    """Return [R, H * G, D] of the scene's requests with one query, by FlashInfer.

    Args:
        scene: with a head-major cache.
        library: in place of the installed package.
    """
    library = library or import_module("flashinfer")
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=scene.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    lists, shape = page_lists(scene), scene.shape
    wrapper.plan(
        lists.first,
        lists.pages,
        lists.last,
        shape.heads * shape.group,
        shape.heads,
        shape.dim,
        shape.block,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        sm_scale=scene.scale,
    )
    query = scene.query[: len(lists.last)]
    return wrapper.run(query, scene.cache.split(shape.dim, dim=-1))


@dataclass(frozen=True)
class Verdict:
    """How far results are from float32.

    Args:
        worst: the largest difference of any number.
        allowed: twice that of PyTorch in the model's type, and what sums may change.
    """

    worst: float
    allowed: float

    def __str__(self) -> str:
        return f"off by {self.worst:.1e}, {self.allowed:.1e} allowed"

    def check(self) -> None:
        """Raise unless the results are near enough, and numbers."""
        assert self.worst <= self.allowed, str(self)


def by_plain(scene: Scene, dtype: torch.dtype) -> torch.Tensor:
    return by_request(scene, plain, dtype)


def judge(scene: Any, found: torch.Tensor, ask: Reference = by_plain) -> Verdict:
    """Compare the first rows of a scene's output with PyTorch in float32."""
    exact = ask(scene, torch.float32)
    rounded = ask(scene, scene.shape.dtype).float()
    rows = slice(len(found))
    worst = (found.float() - exact[rows]).abs().max()
    own = (rounded - exact).abs().max()
    return Verdict(float(worst), 2 * float(own) + FLOOR)


def missing(package: str) -> str | None:
    """Return why a package cannot be asked, None if it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None


def lacking(backend: str) -> str | None:
    """Return why a backend cannot run on this machine, None if it can."""
    return missing("flashinfer") if backend == "FLASHINFER" else None


# -- on a GPU --------------------------------------------------------------------------


@contextmanager
def gpu_config(dtype: torch.dtype, **changes: Any) -> Iterator[tuple[Any, Shape]]:
    """Yield the configuration of an engine on the GPU, and Llama's shape."""
    from vllm.engine.arg_utils import EngineArgs

    shape = Shape(heads=8, group=4, dim=128, block=16, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            "model": str(write_model("llama-3.1-8b", Path(folder))),
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": 4096,
            "block_size": shape.block,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
        }
        config = EngineArgs(**{**fields, **changes}).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"  # which engines work out
        yield config, shape


@contextmanager
def gpu_scenes(
    dtype: torch.dtype, make_scene: Callable[..., Any] = Scene, **changes: Any
) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes scenes of Llama's shape on the GPU.

    It takes the name of a backend, the queries of a request that reads its prompt, and
    a seed.

    Args:
        dtype: of the model.
        make_scene: takes what `Layers` takes.
        **changes: arguments of the engine.
    """
    with gpu_config(dtype, **changes) as (config, shape):

        def make(name: str, queries: int = 1, seed: int = 0) -> Any:
            module, _, attribute = compat.GPU_BACKENDS[name].rpartition(".")
            backend = getattr(import_module(module), attribute)
            batch = requests(Random(seed), shape.block, LONGEST, queries)
            device = torch.device("cuda")
            return make_scene(backend, config, shape, batch, device, seed)

        yield make


def check_on_gpu(checks: Any) -> None:
    """Check each backend, then whether others agree with PyTorch about the same."""
    for dtype in DTYPES:
        with gpu_scenes(getattr(torch, dtype)) as make:
            for backend in compat.GPU_BACKENDS:
                _check_backend(checks, f"{backend}, {dtype}", backend, make)


def _check_backend(
    checks: Any, words: str, backend: str, make: Callable[..., Scene]
) -> None:
    for queries, label in ((1, "decode"), (70, "decode and prefill")):
        with checks.case(f"{words}, {label}, PyTorch") as notes:
            if reason := lacking(backend):
                notes.append(f"NOT RUN: {reason}")
                continue
            for seed in SEEDS:
                scene = make(backend, queries, seed)
                verdict = judge(scene, scene.attend())
                notes.append(str(verdict))
                verdict.check()
    if lacking(backend):
        return
    scene = make(backend, 70)
    for name, ask in others(scene).items():
        with checks.case(f"{words}, the same scene, {name}") as notes:
            if reason := missing(name):
                notes.append(f"NOT RUN: {reason}")
                continue
            notes += agree(scene, ask())


def others(scene: Scene) -> dict[str, Callable[[], torch.Tensor]]:
    """Return how to ask each of the other packages about a scene."""
    return {
        "flashinfer": lambda: flashinfer(scene),
        "xformers": lambda: by_request(scene, xformers, scene.shape.dtype),
    }


def agree(scene: Scene, theirs: torch.Tensor) -> list[str]:
    """Raise unless vLLM's kernels and theirs agree with PyTorch and each other."""
    ours = scene.attend()
    verdict, other = judge(scene, ours), judge(scene, theirs)
    verdict.check()
    other.check()
    apart = float((ours[: len(theirs)].float() - theirs.float()).abs().max())
    between = Verdict(apart, verdict.allowed)
    between.check()
    return [f"theirs {other}", f"apart {apart:.1e}"]
