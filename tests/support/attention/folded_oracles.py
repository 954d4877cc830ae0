"""Attention over heads of their own lengths: each head alone, in float32, says it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from support.attention import oracles
from support.attention.folded_scene import FoldedScene
from support.attention.oracles import DTYPES, SEEDS, plain

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")  # guards refuse the others
PADDED_ROWS = 8  # of decode steps: a size that graphs are captured with
PROMPT = 70
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [PADDED_ROWS],
    },
}


def by_head(scene: FoldedScene, dtype: torch.dtype) -> torch.Tensor:
    """Return [L, T, H * G, D] of `plain`, every head over the tokens that it holds."""
    starts, group, layers = scene.starts(), scene.shape.group, []
    for layer in range(len(scene.layers)):
        query, rows = scene.parts(layer)[0].to(dtype), []
        for number, held in enumerate(scene.held):
            own = query[starts[number] : starts[number + 1]].split(group, dim=1)
            heads = []
            for part, pair in zip(own, held[layer], strict=True):
                keys, values = (side[:, None].to(dtype) for side in pair)
                heads.append(plain(part, keys, values, scene.scale))
            rows.append(torch.cat(heads, dim=1))
        layers.append(torch.cat(rows))
    return torch.stack(layers)


judge = partial(oracles.judge, ask=by_head)


def replay(scene: FoldedScene) -> torch.Tensor:
    """Return what `attend` does, by a call recorded before the requests were there.

    On a GPU the call is the replay of a CUDA graph. On a CPU it is made with the
    metadata of the capture, whose tensors the step fills, at the addresses it keeps.
    """
    output, built = scene.output(), scene.build_empty()
    call = partial(scene.forward, built, output)
    if scene.device.type == "cuda":
        call = captured(call)
    pages = scene.runtime.tier.tables.pages
    scene.build()
    assert scene.runtime.tier.tables.pages is pages, "the tables have moved"
    call()
    return output[:, : scene.num_tokens]


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of a call, which is made once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# -- on a GPU --------------------------------------------------------------------------


def gpu_scenes(
    dtype: torch.dtype, **changes: Any
) -> AbstractContextManager[Callable[..., FoldedScene]]:
    """Return what makes scenes of Llama's shape, whose decode steps are padded."""

    def make(*given: Any) -> FoldedScene:
        _, _, _, batch, device, seed = given
        padding = PADDED_ROWS - len(batch) if batch[-1].queries == 1 else 0
        return FoldedScene(*given[:4], padding, device, seed)

    return oracles.gpu_scenes(dtype, make, **changes)


def check_on_gpu(checks: Any) -> None:
    """Check each backend step by step, then in a graph captured at length one."""
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        with gpu_scenes(kind) as make:
            for name in BACKENDS:
                for queries, label in ((1, "decode"), (PROMPT, "decode and prefill")):
                    with checks.case(
                        f"{name}, {dtype}, own lengths, {label}, PyTorch"
                    ) as notes:
                        for seed in SEEDS:
                            scene = make(name, queries, seed)
                            _check(scene, scene.attend(), notes)
        with gpu_scenes(kind, **GRAPHS) as make:
            for name in BACKENDS:
                with checks.case(
                    f"{name}, {dtype}, own lengths, replay, PyTorch"
                ) as notes:
                    for seed in SEEDS:
                        scene = make(name, seed=seed)
                        _check(scene, replay(scene), notes)


def _check(scene: FoldedScene, found: torch.Tensor, notes: list[str]) -> None:
    verdict = judge(scene, found)
    notes.append(str(verdict))
    verdict.check()
