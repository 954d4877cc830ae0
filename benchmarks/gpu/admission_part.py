"""Owns part h: attention of one layer where three of four tokens are not admitted.

Shapes of Llama-3.1-8B, random keep bits, as in WG-KV (arXiv 2512.17452), appendix I,
whose speed-ups are those of the whole model. A prompt is read in chunks; behind each
chunk refused tokens that have left the window are gone. Three kinds of attention:

dense      vLLM's FlashAttention over everything, all heads in one row
compacted  the same over what each head holds, one row per KV head
until      until_attention over the same pages, which sees what the mask allows

Of the longest prompt a few chunks are timed, and the times of the others lie on the
lines between these. Decoding is timed with the window and what was admitted, without
the tokens that await the next event.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.admission_inputs import gates_of
from benchmarks.gpu.draw import Draw, Size
from benchmarks.gpu.kernel_part import device_of_run
from benchmarks.gpu.plan import Options, Part, Verdict
from benchmarks.gpu.record import Record
from benchmarks.gpu.timing import median_ms
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.visibility import NEVER, until_attention, visible_until
from vllm_kvpolicy.kernels.wgkv_gate import paged_gates

DENSE, KINDS = "dense", ("dense", "compacted", "until")
TARGETS = {"prefill": 3.0, "decode": 1.9}
GATE, REPEATS, LIMIT_S = "gates of a chunk", 40, 60.0
THETA, SEED = 5e5, 0


@dataclass(frozen=True)
class Scene:
    """One prompt in one layer.

    Args:
        tokens: of the prompt, a multiple of the chunk.
        chunk: tokens of a step.
        every: one of so many chunks is timed, and the last one.
        has_target: the paper has figures for this length.
        heads, group, dim, page, window: H, G, D, N and the tokens that all see.
        kept: share of tokens that are admitted.
    """

    tokens: int
    chunk: int = 4096
    every: int = 1
    has_target: bool = True
    heads: int = 8
    group: int = 4
    dim: int = 128
    page: int = 16
    window: int = 256
    kept: float = 0.25

    def timed(self) -> list[int]:
        """Return where the chunks begin that are timed."""
        last = self.tokens - self.chunk
        starts = range(0, self.tokens, self.chunk * self.every)
        return sorted({*starts, last})


SCENES = (
    Scene(102_400, has_target=False),
    Scene(204_800),
    Scene(409_600, every=11),
)
TINY_SCENES = (Scene(192, 48, 2, True, 2, 2, 32, 16, 16),)


def scenes(options: Options) -> tuple[Scene, ...]:
    """Return the prompts."""
    return TINY_SCENES if options.is_tiny else SCENES


def names(options: Options) -> list[str]:
    """Return the names of the part's measurements."""
    return [
        GATE,
        *(
            f"{scene.tokens} tokens; {phase}; {kind}"
            for scene in scenes(options)
            for phase in TARGETS
            for kind in KINDS
        ),
    ]


def run(record: Record, options: Options) -> None:
    """Measure what the record lacks."""
    device = device_of_run()
    repeats = 2 if options.is_tiny else REPEATS
    first = scenes(options)[0]
    options.measure(
        record, GATE, LIMIT_S, lambda: {"ms": time_gates(first, device, repeats)}
    )
    for scene in scenes(options):
        for phase, call in (("prefill", time_prompt), ("decode", time_decode)):
            for kind in KINDS:
                name = f"{scene.tokens} tokens; {phase}; {kind}"
                measured = partial(call, scene, kind, device, repeats)
                options.measure(record, name, LIMIT_S, measured)


class Layer:
    """Keys and values of one layer on pages in random order.

    Args:
        scene: the prompt.
        kind: one of KINDS.
        device: where they are.
    """

    def __init__(self, scene: Scene, kind: str, device: torch.device) -> None:
        self.scene, self.kind, self.device = scene, kind, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(SEED)
        kept = 1.0 if kind == DENSE else scene.kept
        bits = torch.rand(scene.heads, scene.tokens, device=device) < kept
        self.until_of = visible_until(bits, scene.window)
        self.kept_before = torch.nn.functional.pad(bits.int().cumsum(-1), (1, 0))
        most = self.settled(scene.tokens - scene.chunk).max()
        width = int(most) + scene.window + scene.chunk
        width = -(-width // scene.page)
        self.pool, self.tables = self._pages(scene.heads, width)
        self.until = torch.empty(self.pool.shape[:2], dtype=torch.int32, device=device)
        if kind == DENSE and device.type == "cuda":
            shape = width + 1, scene.page, scene.heads, 2 * scene.dim
            self.pool = self.pool[: scene.heads * (width + 1)].view(shape)
            self.tables = torch.randperm(width, device=device)[None].int() + 1

    def _pages(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        scene, count = self.scene, rows * (width + 1)
        shape = count, scene.page, 2 * scene.dim
        pool = torch.randn(shape, dtype=self.dtype, device=self.device)
        order = torch.randperm(count, device=self.device)[: rows * width]
        return pool, order.view(rows, width).int()

    def settled(self, start: int) -> torch.Tensor:
        """Return [H] int64: kept tokens that have left the window of a token."""
        return self.kept_before[:, max(0, start - self.scene.window)].long()

    def step(self, start: int, count: int) -> Callable[[], Any]:
        """Return the attention of `count` tokens behind the first `start` ones."""
        scene, settled = self.scene, self.settled(start)
        local = min(start, scene.window)
        lengths = (settled + local + count).int()
        self._write_until(settled, start - local)
        starts = count * torch.arange(scene.heads + 1, device=self.device).int()
        shape = scene.heads * count, scene.group, scene.dim
        query = torch.randn(shape, dtype=self.dtype, device=self.device)
        if self.kind != "until" and self.device.type == "cuda":
            if self.kind == DENSE:
                query = query.view(count, scene.heads * scene.group, scene.dim)
                starts, lengths = starts[:2], lengths[:1]
            rows = query, self.pool, self.tables, lengths, starts
            return partial(flash_attention, *rows, count, int(lengths.max()))
        keys, values = self.pool.chunk(2, -1)
        return partial(
            until_attention,
            *(query, keys, values, self.tables, lengths, starts),
            torch.full_like(lengths, start + count),
            *(self.until, scene.dim**-0.5, torch.empty_like(query), count),
        )

    def _write_until(self, settled: torch.Tensor, first: int) -> None:
        """Say for every slot when its token leaves.

        Args:
            settled: [H] int64, tokens in front that are kept.
            first: position of the token behind them.
        """
        if self.tables.shape[0] != self.scene.heads:
            return
        place = torch.arange(self.tables.shape[1] * self.scene.page, device=self.device)
        position = place - settled[:, None] + first
        until = self.until_of.gather(1, position.clamp(0, self.scene.tokens - 1))
        until = until.masked_fill(place < settled[:, None], NEVER)
        shape = *self.tables.shape, self.scene.page
        # Without a mask, where vLLM's kernel is stood in for.
        self.until[self.tables.long()] = (
            until.view(shape) if self.kind == "until" else NEVER
        )


def flash_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    max_queries: int,
    longest: int,
) -> torch.Tensor:
    """Attend with vLLM's FlashAttention, causal.

    Args:
        query: [Tq, Hq, D].
        pool: [P, N, H, 2D], or [P, N, 2D] of one head.
        tables: [R, C] int32.
        lengths: [R] int32.
        starts: [R + 1] int32.
        max_queries: of a row.
        longest: of the lengths.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    keys, values = (pool if pool.ndim == 4 else pool.unsqueeze(2)).chunk(2, -1)
    return flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        cu_seqlens_q=starts,
        max_seqlen_q=max_queries,
        seqused_k=lengths,
        max_seqlen_k=longest,
        softmax_scale=query.shape[-1] ** -0.5,
        causal=True,
        block_table=tables,
        fa_version=3 if torch.cuda.get_device_capability()[0] == 9 else 2,
    )


def time_prompt(
    scene: Scene, kind: str, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time chunks of a prompt; `ms` is of all of them, timed or in between."""
    layer = Layer(scene, kind, device)
    timed = {
        start: median_ms(layer.step(start, scene.chunk), device, repeats)
        for start in scene.timed()
    }
    starts = range(0, scene.tokens, scene.chunk)
    every = np.interp(starts, list(timed), list(timed.values()))
    return {"ms": float(every.sum()), "timed": timed, "chunks": len(starts)}


def time_decode(
    scene: Scene, kind: str, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time the step of the token behind the prompt's last but one."""
    layer = Layer(scene, kind, device)
    step = layer.step(scene.tokens - 1, 1)
    return {"ms": median_ms(step, device, repeats)}


def time_gates(scene: Scene, device: torch.device, repeats: int) -> float:
    """Return the milliseconds of the gates of a chunk in one layer."""
    layer = Layer(scene, "until", device)
    keys = PagedTokens(
        [layer.pool[..., : scene.dim]],
        layer.tables.long()[None, None],
        layer.tables.shape[1] * scene.page,
    )
    token = torch.arange(scene.chunk, device=device).expand(1, 1, scene.heads, -1)
    token = token.contiguous()
    size = Size(1, 1, scene.heads, scene.group, dim=scene.dim, dtype=layer.dtype)
    rope = Rope(Rope.from_theta(THETA, scene.dim).inv_freq.to(device))
    weights = gates_of(size, Draw(SEED, device))
    call = partial(paged_gates, keys, token, token, rope, weights)
    return median_ms(call, device, repeats)


def speedup(record: Record, scene: Scene, phase: str, kind: str) -> float | None:
    """Return how many times as fast as dense attention it is."""
    dense, other = (
        record.cells.get(f"{scene.tokens} tokens; {phase}; {name}")
        for name in (DENSE, kind)
    )
    return dense["ms"] / other["ms"] if dense and other else None


def table(record: Record, options: Options) -> tuple[Sequence[str], list[list[str]]]:
    """Return times of one layer, and how many times as fast as dense they are."""
    lines = []
    if GATE in record.cells:
        lines.append([GATE, "", "", f"{record.cells[GATE]['ms']:.3f}", "-"])
    for scene in scenes(options):
        for phase in TARGETS:
            for kind in KINDS:
                name = f"{scene.tokens} tokens; {phase}; {kind}"
                if name not in record.cells:
                    continue
                ratio = speedup(record, scene, phase, kind)
                shown = "-" if ratio is None else f"{ratio:.2f}"
                milliseconds = f"{record.cells[name]['ms']:.3f}"
                lines.append([*name.split("; "), milliseconds, shown])
    return ["prompt", "phase", "attention", "ms", "x dense"], lines


def verdicts(record: Record, options: Options) -> list[Verdict]:
    """Return speed-ups at the lengths for which the paper has them."""
    found = []
    for scene in scenes(options):
        for phase, target in TARGETS.items():
            ratio = speedup(record, scene, phase, "until")
            if scene.has_target and ratio is not None:
                name = f"{scene.tokens} tokens, {phase}: dense / until"
                found.append(Verdict(name, ratio, target))
    return found


PARTS = {
    "h": Part(
        "attention where gates admit a quarter: dense, compacted and masked",
        run,
        names,
        table,
        verdicts,
    )
}
