"""The replay oracle: a dense decoder that sees only what the server says it kept.

A token at position i sees, per (layer, KV head), the survivors of the last event at or
before i and every token from that event's frontier up to itself.
"""

from typing import Any

import torch

from support.engine.reference_decoder import Activations, ReferenceDecoder

TOLERANCE = 1e-3


class Mismatch(AssertionError):
    """The server and a reference disagree."""


def visibility(decoder: ReferenceDecoder, result: Any) -> torch.Tensor:
    """Return what each token sees, [L, H, T, T] bool.

    Args:
        decoder: gives the number of layers and heads.
        result: a `helpers.Result` with its events.
    """
    size = len(result.all_tokens)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    visible = visible.repeat(decoder.num_layers, decoder.num_heads, 1, 1)
    for event in result.events:
        survivors = torch.tensor(event.survivors, dtype=torch.int64)
        survivors = torch.where(survivors < 0, event.frontier, survivors)
        kept = torch.zeros(*survivors.shape[:2], event.frontier + 1, dtype=torch.bool)
        kept = kept.scatter(-1, survivors, True)[..., :-1]
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
    logprobs = activations(decoder, result).logits.log_softmax(-1)
    first = len(result.job.prompt) - 1
    worst, compared = 0.0, 0
    for start, given in ((first, result.logprobs), (0, result.prompt_logprobs)):
        for offset, entry in enumerate(given):
            tokens = torch.tensor(list(entry))
            server = torch.tensor(list(entry.values()))
            difference = (logprobs[start + offset, tokens] - server).abs().max().item()
            compared += len(entry)
            if not difference <= TOLERANCE:
                raise Mismatch(
                    f"{result.job.name}: log-probabilities after token "
                    f"{start + offset} differ by {difference:.2e}"
                )
            worst = max(worst, difference)
    if not compared:
        raise Mismatch(f"{result.job.name}: the server gave no log-probabilities")
    return worst
