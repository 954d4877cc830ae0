"""Owns part f: how the cost of an event grows with requests, layers, heads and tokens.

An event is here what the policy decides and the moving of survivors, with keys on
random pages. One axis is varied at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.kernel_inputs import RECENT, SINKS, Size, make
from benchmarks.gpu.kernel_part import device_of_run
from benchmarks.gpu.plan import Options, Part, Verdict
from benchmarks.gpu.record import Record
from benchmarks.gpu.serving_parts import POLICY
from benchmarks.gpu.timing import median_ms
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.compose import build

POLICIES = (POLICY, "snapkv", "keydiff", "streaming")
INTERVAL_TOKENS = 512  # dropped at an event
BASE = Size(events=1)
AXES: dict[str, tuple[int, ...]] = {
    "events": (1, 2, 4, 8, 16),
    "layers": (8, 16, 32, 64),
    "heads": (2, 4, 8, 16),
    "tokens": (768, 1536, 3072, 6144, 12288, 40_000),
}
TINY_BASE = Size(1, 2, 2, 2, 600, 16, 32, 0, 16, torch.float32)
TINY_AXES = {"events": (1, 2), "tokens": (600, 700)}
SEED, REPEATS, LIMIT_S = 5, 50, 40.0
COMPACT = "compact"


def cells(options: Options) -> dict[str, tuple[str, Size]]:
    """Return what is timed and at which size, by name."""
    base, axes = (TINY_BASE, TINY_AXES) if options.is_tiny else (BASE, AXES)
    found = {}
    for axis, values in axes.items():
        for value in values:
            size = replace(base, **{axis: value})
            size = replace(size, budget=size.tokens - INTERVAL_TOKENS)
            for what in (*POLICIES, COMPACT):
                found[f"{axis} {value}; {what}"] = what, size
    return found


def names(options: Options) -> list[str]:
    """Return the names of the part's measurements."""
    return list(cells(options))


def run(record: Record, options: Options) -> None:
    """Measure what the record lacks."""
    repeats = 2 if options.is_tiny else REPEATS
    for name, (what, size) in cells(options).items():
        call = partial(time_event, what, size, device_of_run(), repeats)
        options.measure(record, name, LIMIT_S, call)


def time_event(
    what: str, size: Size, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time the decision of a policy, or the moving of keys and values."""
    if what == COMPACT:
        arguments = make("compact_pages", size, SEED, device, device).values()

        def call() -> None:
            for _ in ("keys", "values"):
                compact_pages(*arguments)
    else:
        config = KVPolicyConfig(policy=what)
        policy = build(what, config.resolved().options)
        inputs = event_inputs(size, policy.needs.memory, device)
        call = partial(policy.decide, inputs, size.budget)
    milliseconds = median_ms(call, device, repeats)
    return {"ms": milliseconds, "size": size.plain()}


def event_inputs(
    size: Size, memory: tuple[str, ...], device: torch.device
) -> EventInputs:
    """Return an event in which every head holds all T tokens."""
    made = make("window_usage", size, SEED, device, device)
    shape = size.events, size.layers, size.heads
    token = torch.arange(size.tokens, device=device)
    must = (token < SINKS) | (token >= size.tokens - RECENT)
    held = torch.full(shape, size.tokens, device=device)
    numbers = made["keys"].pools[0]
    numbers.nan_to_num_()  # what lay behind shorter rows
    zeros = torch.zeros((*shape, size.tokens), device=device)
    return EventInputs(
        lengths=held,
        must_keep=must.expand(*shape, -1),
        end=torch.full((size.events,), size.tokens, device=device),
        scale=made["scale"],
        keys=made["keys"],
        queries=made["queries"],
        memory=dict.fromkeys(memory, zeros),
    )


def table(record: Record, options: Options) -> tuple[Sequence[str], list[list[str]]]:
    """Return milliseconds by axis and value."""
    places = dict.fromkeys(name.partition("; ")[0] for name in names(options))
    lines = []
    for place in places:
        found = [record.cells.get(f"{place}; {what}") for what in (*POLICIES, COMPACT)]
        lines.append(
            [place, *("-" if cell is None else f"{cell['ms']:.3f}" for cell in found)]
        )
    return ["size", *(f"{what}, ms" for what in (*POLICIES, COMPACT))], lines


def verdicts(record: Record, options: Options) -> list[Verdict]:
    """Return nothing: part d has the target."""
    return []


PARTS = {
    "f": Part(
        "cost of an event against requests, layers, heads and tokens",
        run,
        names,
        table,
        verdicts,
    )
}
