"""The replay oracle: a dense decoder that sees only what the server says it kept.

A token at position i sees, per (layer, KV head), the survivors of the last event at or
before i and every token from that event's frontier up to itself. A request that is
preempted computes its tokens and events anew, and keys may then differ in their last
bit, so that an event between level scores may end in another way: what a token was
computed from is told by the pass that it comes from.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from support.engine.reference_decoder import Activations, ReferenceDecoder

TOLERANCE = 1e-3


class Mismatch(AssertionError):
    """The server and a reference disagree."""


def visibility(
    decoder: ReferenceDecoder, result: Any, events: Sequence[Any] | None = None
) -> torch.Tensor:
    """Return what each token sees, [L, H, T, T] bool.

    Args:
        decoder: gives the number of layers and heads.
        result: a `helpers.Result` with its events.
        events: those of one pass; None for those that happened last.
    """
    size = len(result.all_tokens)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    visible = visible.repeat(decoder.num_layers, decoder.num_heads, 1, 1)
    for event in result.events if events is None else events:
        survivors = torch.tensor(event.survivors, dtype=torch.int64)
        survivors = torch.where(survivors < 0, event.frontier, survivors)
        kept = torch.zeros(*survivors.shape[:2], event.frontier + 1, dtype=torch.bool)
        kept = kept.scatter(-1, survivors, True)[..., :-1]
        kept[..., : event.pinned] = True
        visible[:, :, event.position :, : event.frontier] = kept[:, :, None]
    return visible


def activations(decoder: ReferenceDecoder, result: Any) -> Activations:
    """Run a request's tokens under the server's recorded survivors."""
    return decoder.forward(result.all_tokens, visibility(decoder, result))


def check_replay(decoder: ReferenceDecoder, result: Any) -> float:
    """Compare every log-probability the server gave with the reference's.

    Returns:
        The largest difference.

    Raises:
        Mismatch: one differs by more than TOLERANCE, or none could be compared.
    """
    assert len(result.computed_in) == len(result.tokens), result.job.name
    found = []
    for number in sorted(set(result.computed_in)):
        events = result.passes[number] if number < len(result.passes) else []
        visible = visibility(decoder, result, events)
        found += check_logprobs(decoder, result, visible, number)
    if not found:
        raise Mismatch(f"{result.job.name}: the server gave no log-probabilities")
    return max(found)


def check_logprobs(
    decoder: ReferenceDecoder, result: Any, visible: torch.Tensor, number: int
) -> list[float]:
    """Compare the log-probabilities of a pass with those under a mask [L, H, T, T].

    Returns:
        The largest difference of each token.

    Raises:
        Mismatch: one differs by more than TOLERANCE.
    """
    found = []
    seen = decoder.forward(result.all_tokens, visible)
    logprobs = seen.logits.log_softmax(-1)
    for place, entry in _computed_in(result, number):
        tokens = torch.tensor(list(entry))
        server = torch.tensor(list(entry.values()))
        found.append((logprobs[place, tokens] - server).abs().max().item())
        if not found[-1] <= TOLERANCE:
            raise Mismatch(
                f"{result.job.name}: log-probabilities after token {place} differ "
                f"by {found[-1]:.2e}; pass {number + 1} of {len(result.passes)}"
            )
    return found


def _computed_in(result: Any, number: int) -> Iterator[tuple[int, dict[int, float]]]:
    """Yield the places whose log-probabilities a pass gave, and these.

    Those of the prompt come with the first token.
    """
    if result.computed_in[0] == number:
        yield from enumerate(result.prompt_logprobs)
    first = len(result.job.prompt) - 1
    for offset, entry in enumerate(result.logprobs):
        if result.computed_in[offset] == number:
            yield first + offset, entry
