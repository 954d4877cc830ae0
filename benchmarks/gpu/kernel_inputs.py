"""Owns random inputs for every operation, as an event or a step of a real model has.

The same seed and source give the same inputs on any device, so that an implementation
on a GPU can be compared with the reference on a CPU.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pkgutil import iter_modules

import torch

from benchmarks.gpu import admission_inputs, event_inputs, step_inputs
from benchmarks.gpu.draw import CPU, Arguments, Draw, Size
from vllm_kvpolicy import kernels
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.segment_quota import segment_quota_ref, to_fixed_point
from vllm_kvpolicy.policies.allocators.ams import PRESETS, AMSOptions

SINKS, RECENT = 4, 32

REAL_SIZES = {
    "llama": Size(),
    "llama, half": Size(events=1, dtype=torch.float16, tokens=2600, budget=2048),
    "odd": Size(events=3, layers=5, heads=3, group=7, tokens=611, dim=80, page=32),
    "long": Size(events=1, layers=2, tokens=40_000, budget=4096),
    "float": Size(events=1, layers=4, tokens=700, budget=300, dtype=torch.float32),
    # More than 2^31 numbers.
    "far": Size(events=1, layers=2, tokens=900, budget=512, pool_pages=2**19 + 99),
}
SMALL_SIZES = {
    "small": Size(2, 2, 2, 2, 160, 32, 8, 96, 16, torch.float32),
    "odd": Size(3, 1, 3, 3, 121, 16, 5, 64, 32, torch.float32, pool_pages=99),
}


def operations() -> dict[str, Operation]:
    """Return every operation by name."""
    found = {}
    for module in iter_modules(kernels.__path__):
        if not module.ispkg:
            owner = import_module(f"{kernels.__name__}.{module.name}")
            for value in vars(owner).values():
                if isinstance(value, Operation) and value.stem == module.name:
                    found[value.name] = value
    return found


def pool(size: Size, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pool [P, N, 2D] on the device and the rows' pages [R, C] on the host.

    Page 0 is nobody's; pages that no row holds are zero.
    """
    held = size.rows * size.row_pages
    count = max(held + 1, size.pool_pages)
    pages = draw.order(count - 1)[:held] + 1
    content = draw.normal(held, size.page, 2 * size.dim).to(size.dtype)
    shape = count, size.page, 2 * size.dim
    numbers = torch.zeros(shape, dtype=size.dtype, device=draw.device)
    numbers[pages.to(draw.device)] = content.to(draw.device)
    return numbers, pages.view(size.rows, size.row_pages)


def score(size: Size, draw: Draw) -> torch.Tensor:
    """Return scores [R, T] float32 with ties, zeros of both signs and NaN."""
    score = (64 * draw.normal(size.rows, size.tokens)).round() / 64
    score[draw.uniform(*score.shape) < 0.01] = torch.nan
    score[draw.uniform(*score.shape) < 0.05] = -0.0
    return score


def masks(size: Size, draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return lengths [R], and valid and must-keep tokens [R, T] bool."""
    least = SINKS + RECENT + 2
    lengths = draw.lengths(size, least)
    position = torch.arange(size.tokens)
    valid = position < lengths[:, None]
    must = (position < SINKS) | (position >= lengths[:, None] - RECENT)
    return lengths, valid, must & valid


def paged_keys(size: Size, draw: Draw) -> Arguments:
    """Paged keys and their rows' lengths; keys behind a row's length are NaN."""
    shape = size.events, size.layers, size.heads
    numbers, pages = pool(size, draw)
    lengths = draw.lengths(size, 1)
    token = torch.arange(size.row_pages * size.page)
    behind = (token >= lengths[:, None]).view(*pages.shape, size.page)
    where = pages[..., None] * size.page + torch.arange(size.page)
    numbers.flatten(0, 1)[where[behind].to(draw.device)] = torch.nan
    keys = PagedTokens(
        [numbers[..., : size.dim]] * size.layers,
        pages.view(*shape, -1).to(draw.device),
        size.tokens,
    )
    return {"lengths": lengths.view(shape).to(draw.device), "keys": keys}


def make_window_usage(
    size: Size, draw: Draw, mass: float | None = None, has_sinks: bool = False
) -> Arguments:
    """Queries and paged keys, and learned sinks."""
    made = paged_keys(size, draw)
    shape = size.events, size.layers, size.heads * size.group, size.window, size.dim
    made |= {"queries": draw.normal(*shape).to(size.dtype)}
    made |= {"scale": size.dim**-0.5, "mass": mass}
    if has_sinks:
        made |= {"sink_logits": draw.normal(*shape[1:3])}
    return made


def make_paged_norms(size: Size, draw: Draw) -> Arguments:
    """Paged values."""
    made = paged_keys(size, draw)
    return {"tokens": made["keys"], "lengths": made["lengths"]}


def directions(size: Size, draw: Draw, heads: int) -> torch.Tensor:
    """Return directions [E, L, heads, D], short: sums round to less than is allowed."""
    return draw.normal(size.events, size.layers, heads, size.dim) / size.dim


def make_paged_projections(size: Size, draw: Draw) -> Arguments:
    """Paged keys and one direction per KV head."""
    made = paged_keys(size, draw)
    return made | {"directions": directions(size, draw, size.heads)}


def make_paged_pair_projections(size: Size, draw: Draw) -> Arguments:
    """Paged keys, and a direction and weights of lengths per query head."""
    made = paged_keys(size, draw)
    along = directions(size, draw, size.heads * size.group)
    by_length = directions(size, draw, size.heads * size.group)[..., ::2]
    return made | {"directions": along, "by_length": by_length}


def make_paged_quadratics(size: Size, draw: Draw) -> Arguments:
    """Paged keys, and a direction and a covariance of queries per query head."""
    made = paged_keys(size, draw)
    along = directions(size, draw, size.heads * size.group)
    queries = draw.normal(*along.shape, size.dim) / size.dim
    spread = queries @ queries.transpose(-1, -2) / size.dim
    return made | {"directions": along, "matrices": spread}


def make_segment_quota(size: Size, draw: Draw, preset: str = "default") -> Arguments:
    """Mass in fixed point; sinks hold much of it."""
    lengths, valid, exempt = masks(size, draw)
    usage = draw.uniform(*valid.shape).double() ** 6
    usage[:, :2] += 0.1 * size.tokens / 7
    usage = usage * valid
    choosable = (valid & ~exempt).sum(-1)
    config = AMSOptions(**PRESETS[preset])
    keys = ("segment_mass", "min_segment", "max_segment", "min_quota")
    return {
        "mass": to_fixed_point(usage / usage.sum(-1, keepdim=True)),
        "lengths": lengths,
        "exempt": exempt,
        "total": choosable.clamp(max=size.budget - SINKS - RECENT),
        **{key: getattr(config, key) for key in keys},
    }


def make_credited_mass(size: Size, draw: Draw) -> Arguments:
    """Usage and credit, a few of them NaN."""
    lengths = draw.lengths(size, SINKS)
    usage, credit = draw.uniform(2, size.rows, size.tokens) ** 6
    usage[draw.uniform(*usage.shape) < 0.01] = torch.nan
    made = {"usage": usage, "lengths": lengths, "credit": credit}
    return made | {"decay": 0.8, "mix": 0.7}


def make_pooled_usage(size: Size, draw: Draw) -> Arguments:
    """Rows that hold more and less than the window."""
    lengths = draw.lengths(size, 1)
    usage = draw.uniform(size.rows, size.tokens)
    shape = size.events, size.layers, size.heads
    return {
        "usage": usage.view(*shape, -1),
        "lengths": lengths.view(shape),
        "window": lengths.clamp(max=size.window).view(shape),
    }


def make_pick_by_quota(size: Size, draw: Draw) -> Arguments:
    """Scores, and segments with their quotas; exempt tokens belong to none."""
    arguments = make_segment_quota(size, draw)
    made = segment_quota_ref(**arguments)
    nobody = made.quotas.shape[-1]
    group = made.segment_of.masked_fill(arguments["exempt"], nobody)
    return {"score": score(size, draw), "group": group, "quotas": made.quotas}


def make_fill_next_best(size: Size, draw: Draw) -> Arguments:
    """A tenth is kept already."""
    _, valid, must = masks(size, draw)
    keep = must | (valid & (draw.uniform(*valid.shape) < 0.1))
    target = draw.integers(0, size.tokens, size.rows)
    target[:2] = size.budget
    return {"keep": keep, "score": score(size, draw), "valid": valid, "target": target}


def make_top_k_mask(size: Size, draw: Draw) -> Arguments:
    """The budget of each row, or all that it holds."""
    lengths, valid, must = masks(size, draw)
    rows = {"score": score(size, draw), "must_keep": must, "valid": valid}
    return rows | {"budget": lengths.clamp(max=size.budget)}


def make_resize(size: Size, draw: Draw) -> Arguments:
    """Choices to fill up and choices to trim."""
    lengths, valid, must = masks(size, draw)
    pages = lengths // size.page
    return {
        "keep": must | (valid & (draw.uniform(*valid.shape) < 0.5)),
        "score": score(size, draw),
        "must_keep": must & (torch.arange(size.tokens) < SINKS),
        "num_pages": pages,
        "quota": pages.clamp(max=-(-size.budget // size.page)),
        "block_size": size.page,
    }


def make_compact_pages(size: Size, draw: Draw, loyalty: float = 1.0) -> Arguments:
    """Survivors of rows; a share of pages changes its owner.

    Args:
        size: survivors per row are its budget.
        loyalty: share of pages that stay where they are in their row's list.
    """
    numbers, before = pool(size, draw)
    kept = min(size.budget, size.tokens)
    chosen = draw.uniform(size.rows, size.tokens).topk(kept, dim=-1).indices
    chosen = chosen.sort(dim=-1).values
    after = before[:, : -(-kept // size.page)].clone()
    leaves = draw.uniform(*after.shape) >= loyalty
    moved = after[leaves]
    after[leaves] = moved[draw.order(len(moved))]
    place = torch.arange(kept)
    in_place = (after == before[:, : after.shape[1]])[:, place // size.page]
    source = before.gather(1, chosen // size.page) * size.page + chosen % size.page
    dest = after[:, place // size.page] * size.page + place % size.page
    # A row of survivors that do not exist: slot 0 onto itself.
    nobody = torch.zeros(5, dtype=torch.int64)
    first = torch.arange(size.rows + 1) * kept
    moves = {
        "source_slots": torch.cat((source.flatten(), nobody)),
        "dest_slots": torch.cat((dest.flatten(), nobody)),
        "first": torch.cat((first, first[-1:] + len(nobody))),
    }
    if loyalty < 1:
        moves["in_place"] = torch.cat((in_place.flatten(), nobody == 0))
    return {"pages": numbers[..., : size.dim], **moves}


def page_bounds_of(size: Size, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bounds [2, P, D] of pages, NaN on those of nobody, and the rows' pages."""
    numbers, pages = pool(size, draw)
    bounds = torch.full((2, len(numbers), size.dim), torch.nan, dtype=size.dtype)
    low = draw.normal(pages.numel(), size.dim)
    high = low + draw.uniform(*low.shape)
    bounds[:, pages.flatten()] = torch.stack((low, high)).to(size.dtype)
    return bounds, pages


def make_page_bounds(size: Size, draw: Draw) -> Arguments:
    """Keys of the pages of all rows; some are listed twice."""
    numbers, pages = pool(size, draw)
    listed = torch.cat((pages[1:].flatten(), pages[-1]))
    bounds = torch.zeros(2, len(numbers), size.dim, dtype=size.dtype)
    return {"bounds": bounds, "pages": listed, "keys": numbers[..., : size.dim]}


def make_page_scores(size: Size, draw: Draw) -> Arguments:
    """Queries, and bounds of a part of the pages of each row."""
    bounds, pages = page_bounds_of(size, draw)
    queries = draw.normal(size.rows, size.group, size.dim) / size.dim
    counts = draw.integers(0, size.row_pages + 1, size.rows)
    counts[:2] = torch.tensor([size.row_pages, 0])
    behind = torch.arange(size.row_pages) >= counts[:, None]
    return {
        "queries": queries.to(size.dtype),
        "pages": pages.masked_fill(behind, 0).int(),
        "counts": counts.int(),
        "bounds": bounds,
    }


def make_paged_gates(size: Size, draw: Draw) -> Arguments:
    """Gates of the newest tokens of each row."""
    return admission_inputs.gates_of_newest(size, draw, paged_keys(size, draw))


Maker = Callable[[Size, Draw], Arguments]
# Of an operation with several kinds of inputs, those behind a comma.
SPECIAL: dict[str, Maker] = {
    "window_usage, nuclei": partial(make_window_usage, mass=0.9),
    "window_usage, sinks": partial(make_window_usage, has_sinks=True),
    "paged_cosines": paged_keys,
    "segment_quota, code": partial(make_segment_quota, preset="code"),
    "compact_pages, owners": partial(make_compact_pages, loyalty=0.6),
    "until_attention, prompts": partial(
        admission_inputs.make_until_attention, queries=64
    ),
}
# All others are the functions of their names, wherever they are.
NAMED = {
    **vars(admission_inputs),
    **vars(event_inputs),
    **vars(step_inputs),
    **globals(),
}
MAKERS: dict[str, Maker] = {
    name.removeprefix("make_"): maker
    for name, maker in NAMED.items()
    if name.startswith("make_")
} | SPECIAL
"""By operation, and what is special about the inputs behind a comma."""


def make(
    label: str, size: Size, seed: int, device: torch.device, source: torch.device = CPU
) -> Arguments:
    """Return the arguments of one call of an operation.

    Args:
        label: one of MAKERS.
        seed: the same one gives the same numbers on every device.
        source: where they are drawn.
    """
    with source:
        draw = Draw(seed, device, source)
        return draw.here(MAKERS[label](size, draw))
