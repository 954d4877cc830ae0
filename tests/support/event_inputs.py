"""Random events for tests of policies: ragged, padded, with whatever `Needs` names.

Rows hold 4 sinks, then tokens with gaps between their positions, then a local area
without gaps. Padding is NaN where it may hold anything. No value decides a shape, so
the builders also run on fake tensors.
"""

from dataclasses import fields, replace
from itertools import product

import torch
from torch.utils._pytree import tree_map_only

from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs
from vllm_kvpolicy.policies.compose import measure_usage
from vllm_kvpolicy.policies.words import BaseAllocator

EVENTS, LAYERS, HEADS, GROUP, SIZE, TOKENS = 3, 2, 2, 2, 8, 160
SINKS = 4
# Tokens held per (event, layer, head), and local tokens per event.
LENGTHS = (((160, 121), (97, 160)), ((131, 131), (131, 131)), ((90, 112), (156, 99)))
LOCAL = (32, 47, 39)
SHORTEST = 90
# Every (event, layer, head).
ROWS = list(product(range(EVENTS), range(LAYERS), range(HEADS)))
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0])
# Fields with a token axis behind event, layer and head.
BY_TOKEN = ("must_keep", "keys", "values", "positions", "memory")


def make_inputs(
    needs: Needs,
    *,
    lengths: object = LENGTHS,
    local: object = LOCAL,
    width: int = TOKENS,
    window: int | None = None,
    sinks: int = SINKS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> EventInputs:
    """Build events that hold what `needs` asks for, and nothing else.

    Args:
        needs: fields to fill; None stays in the others.
        lengths: [E, L, H] nested integers, at most `width`.
        local: [E] integers, newest tokens that must stay.
        width: T, tokens after padding.
        window: queries to give, if not as many as `needs` asks for.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    held = torch.tensor(lengths)
    events, layers, heads = held.shape
    rows = (events, layers, heads, width)
    index = torch.arange(width)
    is_local = index >= held[..., None] - torch.tensor(local)[:, None, None, None]
    valid = index < held[..., None]
    end = 3 * width + 50 * torch.arange(events)
    if window is None:
        window = needs.window_tokens
    queries = draw(events, layers, heads * GROUP, window, SIZE).to(dtype)
    keys, values = (
        draw(*rows, SIZE).masked_fill(~valid[..., None], torch.nan).to(dtype)
        for _ in range(2)
    )
    marks = torch.rand(rows, generator=generator)
    signals = {name: draw(events, 4 * width + 50 * events) for name in needs.signals}
    return EventInputs(
        lengths=held,
        must_keep=((index < sinks) | is_local) & valid,
        end=end,
        scale=SIZE**-0.5,
        keys=keys if needs.keys else None,
        values=values if needs.values else None,
        queries=queries if window else None,
        positions=_positions(marks, is_local, valid, end) if needs.positions else None,
        rope=Rope.from_theta(1e4, SIZE) if needs.rope else None,
        signals=signals if needs.signals else None,
        prompt_lengths=end // 3 if needs.signals else None,
        memory={name: marks.masked_fill(~valid, 0.0) for name in needs.memory},
    )


def _positions(
    gaps: torch.Tensor, is_local: torch.Tensor, valid: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """True positions [E, L, H, T]: steps of 1 to 3 back from the newest token."""
    step = torch.where(is_local, 1, (gaps * 3).long() + 1).masked_fill(~valid, 0)
    newer_or_same = step.flip(-1).cumsum(-1).flip(-1)
    position = end[:, None, None, None] - newer_or_same
    index = torch.arange(gaps.shape[-1])
    return torch.where(index < SINKS, index, position)


def one_event(inputs: EventInputs, event: int, width: int) -> EventInputs:
    """Return event `event` alone, padded to `width` tokens."""

    given = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    alone = tree_map_only(torch.Tensor, lambda part: part[event : event + 1], given)
    by_token = {name: alone[name] for name in BY_TOKEN}
    cut = tree_map_only(torch.Tensor, lambda part: part[:, :, :, :width], by_token)
    return EventInputs(**alone | cut)


def on_device(inputs: EventInputs, device: str) -> EventInputs:
    """Return the same event with all its tensors on `device`."""

    given = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    moved = tree_map_only(torch.Tensor, lambda part: part.to(device), given)
    if inputs.rope is not None:
        rope = replace(inputs.rope, inv_freq=inputs.rope.inv_freq.to(device))
        moved["rope"] = rope
    return EventInputs(**moved)


def make_score(kind: str, shape: torch.Size, seed: int = 0) -> torch.Tensor:
    """Return scores of `shape`: "random", with "ties", "flat", or "special" numbers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(shape, generator=generator)
    if kind == "flat":
        return torch.zeros(shape)
    if kind == "ties":
        return (drawn * 4).round()
    if kind == "special":
        return SPECIAL[(drawn * len(SPECIAL)).long()]
    return drawn


def choose(
    allocator: BaseAllocator, score: torch.Tensor, inputs: EventInputs, budget: int
) -> Decision:
    """Return what an allocator chooses at events, as the worker asks it."""
    usage = measure_usage(allocator.needs, inputs)
    return allocator.choose(score, inputs, usage, budget)


def window_logits(
    inputs: EventInputs, at: tuple[int, int, int], window: int
) -> torch.Tensor:
    """Return a row's newest queries on its keys, [G, W, length] float64."""
    event, layer, head = at
    length = int(inputs.lengths[at])
    window = min(window, max(length - 1, 1))
    keys = inputs.given("keys")[at][:length].double()
    group = slice(head * GROUP, (head + 1) * GROUP)
    queries = inputs.given("queries")[event, layer, group, -window:].double()
    later = torch.arange(length) > torch.arange(length - window, length)[:, None]
    return (queries @ keys.T * inputs.scale).masked_fill(later, -torch.inf)


def marked(mask: torch.Tensor, at: tuple[int, ...]) -> set[int]:
    """Return the tokens of a row that a mask [E, L, H, T] is true of."""
    return set(mask[at].nonzero().flatten().tolist())
