"""What an admission leaves of every head, followed through all events of a request."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from support.engine.helpers import BLOCK
from support.engine.oracle_replay import activations, check_replay

Decisions = tuple[torch.Tensor, torch.Tensor]


def closed_form(kept: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """Return [H, T, T] bool: what queries see of keys with `exact` attention.

    Args:
        kept: [H, T] bool, tokens that are admitted.
        window: newest tokens that every query sees, itself included.
        sinks: first tokens that it sees.
    """
    place = torch.arange(kept.shape[-1])
    age = place[:, None] - place
    kept = kept | (place < sinks)
    return (age >= 0) & ((age < window) | kept[:, None, :])


def follow_all(
    results: Iterable[Any],
    decoder_of: Callable[[Any], Any],
    sinks: int,
    has_budget: bool = False,
    decide: Callable[[Any, Any], Decisions] = lambda decoder, _: decoder.decisions(),
) -> Counter[str]:
    """Check answers and survivors of requests against the decisions of decoders.

    Args:
        results: see `follow_decisions`, as for `sinks` and `has_budget`.
        decoder_of: returns the decoder of a result.
        decide: returns what that says after a forward pass: what is dropped, and what
            may go either way.

    Returns:
        The sums of what `follow_decisions` returns; hardly a token may go either way.
    """
    total: Counter[str] = Counter()
    for result in results:
        decoder = decoder_of(result)
        check_replay(decoder, result)
        activations(decoder, result)
        decisions = decide(decoder, result)
        total.update(follow_decisions(result, *decisions, sinks, has_budget))
    assert total["near"] <= total["kept"] / 100
    return total


def follow_decisions(
    result: Any,
    is_dropped: torch.Tensor,
    is_near: torch.Tensor,
    sinks: int,
    has_budget: bool,
) -> dict[str, int]:
    """Check what each event left of each head, against decisions on its tokens.

    Args:
        result: a `helpers.Result` with its events.
        is_dropped: [L, H, T] bool, decisions of a reference.
        is_near: [L, H, T] bool, decisions that may go either way.
        sinks: first tokens that stay in any case.
        has_budget: an eviction may drop tokens that are not dropped here.

    Returns:
        How many tokens of all events and heads were seen, by what became of them.
    """
    seen = dict.fromkeys(("kept", "dropped", "fillers", "evicted", "near"), 0)
    layers, heads = is_dropped.shape[:2]
    for layer in range(layers):
        for head in range(heads):
            drops = is_dropped[layer, head].tolist()
            nears = is_near[layer, head].tolist()
            held: list[int] = []
            frontier = 0
            for event in result.events:
                candidates = [*held, *range(frontier, event.frontier)]
                row = event.survivors[layer][head]
                left = {int(token) for token in row if token >= 0}
                assert left <= set(candidates), "a token came back"
                near = {t for t in candidates if nears[t]}
                gone = {t for t in candidates if drops[t] and t >= sinks} - near
                wanted = set(candidates) - gone - near
                assert set(range(min(sinks, event.frontier))) <= left
                fillers = gone & left
                if has_budget:
                    assert not fillers or wanted <= left
                    seen["evicted"] += len(wanted - left)
                else:
                    assert len(fillers) < BLOCK, "a whole page of dropped tokens"
                    assert wanted <= left, "a kept token was dropped"
                seen["kept"] += len(wanted & left)
                seen["dropped"] += len(gone - left)
                seen["fillers"] += len(fillers)
                seen["near"] += len(near)
                held, frontier = sorted(left), event.frontier
    return seen
