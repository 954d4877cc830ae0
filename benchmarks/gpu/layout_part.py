"""Owns part g: the Hard-KV layouts, on the paper's profile of heads.

Tables are prepared by benchmarks/kernels/bench_block_tables.py, which says what the
layouts are. Here attention runs over as many tokens as each layout makes it walk, a
token per request: without the masks of sparse, max and sum, so in favour of these.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.kernel_part import device_of_run
from benchmarks.gpu.plan import Options, Part, Verdict
from benchmarks.gpu.record import Record
from benchmarks.gpu.timing import median_ms
from benchmarks.kernels import bench_block_tables
from benchmarks.kernels.bench_block_tables import REFERENCE, Case

GROUP, DIM = 4, 128
PREPARE = "prepare"
LAYOUTS = ("sparse", REFERENCE, "max", "sum", "ours")
TOKENS = (4096, 12288, 20480)
REPEATS, LIMIT_S, PREPARE_LIMIT_S = 40, 30.0, 120.0
Attend = Callable[..., torch.Tensor]


def cases(options: Options) -> list[Case]:
    """Return what is laid out: L, H, requests, page, tokens."""
    if options.is_tiny:
        return [Case(2, 2, 2, 16, 64)]
    return [Case(36, 8, 32, 16, tokens) for tokens in TOKENS]


def names(options: Options) -> list[str]:
    """Return the names of the part's measurements."""
    return [
        PREPARE,
        *(
            f"{case.tokens} tokens; {kernel}; {layout}"
            for case in cases(options)
            for kernel in kernels()
            for layout in LAYOUTS
        ),
    ]


def kernels() -> dict[str, Attend]:
    """Return attention kernels by name."""
    if torch.cuda.is_available():
        return {"flash": flash_attention, "triton": triton_attention}
    return {"plain": plain_attention}


def run(record: Record, options: Options) -> None:
    """Measure what the record lacks."""
    device = device_of_run()
    call = partial(prepare, record, options, device)
    options.measure(record, PREPARE, PREPARE_LIMIT_S, call)
    for case in cases(options):
        for kernel in kernels():
            for layout in LAYOUTS:
                call = partial(attend, case, layout, kernel, device, options)
                name = f"{case.tokens} tokens; {kernel}; {layout}"
                options.measure(record, name, LIMIT_S, call)


def prepare(record: Record, options: Options, device: torch.device) -> dict[str, Any]:
    """Time how tables are built."""
    path = record.path.with_suffix(".tables")
    case = cases(options)[0]
    words = f"--layers {case.layers} --heads {case.heads} --requests {case.requests} "
    words += f"--pages {case.page} --device {device.type}"
    tokens = [str(each.tokens) for each in cases(options)]
    bench_block_tables.main(
        [*words.split(), "--tokens", *tokens, "--repeats", "5", "--out", str(path)]
    )
    found = json.loads(path.read_text())
    path.unlink()
    return {"results": found["results"]}


def walked(case: Case, layout: str) -> torch.Tensor:
    """Return [L, H] int64, tokens that attention walks per head."""
    kept = case.kept()
    lengths = {
        "sparse": torch.full_like(kept, case.tokens),
        REFERENCE: torch.full_like(kept, -(-int(kept.sum()) // kept.numel())),
        "max": torch.full_like(kept, int(kept.max())),
        "sum": torch.full_like(kept, int(kept.sum(-1).max())),
        "ours": kept,
    }
    return lengths[layout]


def attend(
    case: Case, layout: str, kernel: str, device: torch.device, options: Options
) -> dict[str, Any]:
    """Time a step's attention in all layers; rows are (request, KV head)."""
    lengths = walked(case, layout)
    rows, width = case.requests * case.heads, -(-int(lengths.max()) // case.page)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = rows * width + 1, case.page, 1, 2 * DIM
    pool = torch.randn(shape, dtype=dtype, device=device)
    order = torch.randperm(rows * width, device=device) + 1
    tables = order.view(rows, width).int()
    queries = torch.randn(rows, GROUP, DIM, dtype=dtype, device=device)
    by_layer = [
        layer.repeat(case.requests).int().to(device) for layer in lengths.unbind()
    ]
    longest = [int(layer.max()) for layer in lengths.unbind()]
    call = kernels()[kernel]

    def step() -> None:
        for held, most in zip(by_layer, longest, strict=True):
            call(queries, pool[..., :DIM], pool[..., DIM:], tables, held, most)

    milliseconds = median_ms(step, device, 2 if options.is_tiny else REPEATS)
    read = 2 * DIM * pool.element_size() * case.requests * int(lengths.sum())
    return {"ms": milliseconds, "bytes": read, "layers": case.layers}


def flash_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Attend with vLLM's FlashAttention.

    Args:
        queries: [rows, G, D].
        keys: [P, N, 1, D].
        values: [P, N, 1, D].
        tables: [rows, C] int32.
        lengths: [rows] int32, at least 1.
        longest: the largest of them.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    starts = torch.arange(len(queries) + 1, dtype=torch.int32, device=queries.device)
    return flash_attn_varlen_func(
        q=queries,
        k=keys,
        v=values,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=longest,
        softmax_scale=DIM**-0.5,
        causal=True,
        block_table=tables,
        fa_version=3 if torch.cuda.get_device_capability()[0] == 9 else 2,
    )


def triton_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Attend with vLLM's Triton kernel; see `flash_attention`."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    starts = torch.arange(len(queries) + 1, dtype=torch.int32, device=queries.device)
    out = torch.empty_like(queries)
    scale = torch.ones(1, 1, device=queries.device)
    unified_attention(
        q=queries,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=longest,
        softmax_scale=DIM**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=tables,
        softcap=0.0,
        q_descale=None,
        k_descale=scale,
        v_descale=scale,
    )
    return out


def plain_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Attend with plain PyTorch; see `flash_attention`."""
    held = tables.long()
    dense = [pool[held].flatten(1, 3)[:, :longest] for pool in (keys, values)]
    mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
    mask = mask[:, None].expand(-1, queries.shape[1], -1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries, *dense, attn_mask=mask, scale=DIM**-0.5
    )
    return attended


def table(record: Record, options: Options) -> tuple[Sequence[str], list[list[str]]]:
    """Return prepare and compute times of the layouts."""
    prepared: dict[tuple[int, str], float] = {}
    if PREPARE in record.cells:
        for result in record.cells[PREPARE]["results"]:
            for layout, milliseconds in result["build_ms"].items():
                prepared[result["tokens"], layout] = milliseconds
    lines = []
    for name in names(options)[1:]:
        cell = record.cells.get(name)
        if cell is None:
            continue
        tokens, kernel, layout = name.split("; ")
        build = prepared.get((int(tokens.split()[0]), layout))
        lines.append(
            [
                tokens,
                kernel,
                layout,
                "-" if build is None else f"{build:.3f}",
                f"{cell['ms']:.3f}",
                f"{cell['bytes'] / cell['ms'] / 1e6:.0f}",
            ]
        )
    return ["held", "kernel", "layout", "prepare, ms", "compute, ms", "GB/s"], lines


def verdicts(record: Record, options: Options) -> list[Verdict]:
    """Return nothing: the layouts are compared with each other."""
    return []


PARTS = {
    "g": Part(
        "the Hard-KV layouts: prepare and compute time",
        run,
        names,
        table,
        verdicts,
    )
}
