"""Log-loss of texts while a policy drops what came before.

A text is one prompt. From its first event on, each token is predicted from what the
policy kept and from what came since. The loss is that of tokens behind the first event
of the budget, in nats; full KV is scored at the same places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.language.engines import Asker, predictions
from benchmarks.language.texts import Text

PLACES = 8
"""Parts of an interval by which losses are told apart."""

DIGITS = 4


def first_event(budget: int, interval: int) -> int:
    """Return the position of the first event inside a prompt; see vllm_kvpolicy.events.

    >>> first_event(512, 256), first_event(500, 256)
    (768, 512)
    """
    return (budget // interval + 1) * interval


@dataclass(frozen=True)
class Scored:
    """A text's losses.

    Attributes:
        losses: [tokens - 1], nats. Entry i is the loss of token i + 1, which the token
            at position i predicts.
        held: KV tokens that were read behind the first event, beside full KV's; None
            where it is not known.
    """

    losses: np.ndarray
    held: float | None = None


def measure(
    asker: Asker, policy: str, budget: int, texts: Sequence[Text]
) -> list[Scored]:
    """Return the losses of each text, and what was held."""
    found = predictions(asker, [text.token_ids for text in texts], policy, budget, 0)
    first = first_event(budget, asker.interval)
    return [
        Scored(losses_of(one.entries, text.token_ids[1:]), one.held_share(first))
        for one, text in zip(found, texts, strict=True)
    ]


def losses_of(
    entries: Sequence[Mapping[int, float]], token_ids: Sequence[int]
) -> np.ndarray:
    """Return -log p of tokens, [tokens], nats, from what is predicted for each."""
    pairs = zip(entries, token_ids, strict=True)
    return np.array([-entry[token] for entry, token in pairs])


def figures(scored: Scored, budget: int, interval: int) -> dict[str, Any]:
    """Return what is kept of a text's losses.

    Returns:
        `loss`: mean from the first event on; `places`: the same for each of PLACES
        equal parts of the intervals, the one right behind events first; `held`.

    Raises:
        ValueError: the text ends before an interval behind its first event has.
    """
    first, losses = first_event(budget, interval), scored.losses
    if len(losses) < first + interval:
        raise ValueError(
            f"text-tokens: got {len(losses) + 1}, expected at least "
            f"{first + interval + 1}, the first event and an interval"
        )
    behind = losses[first:]
    places = np.arange(len(behind)) % interval * PLACES // interval
    return {
        "loss": round(float(behind.mean()), DIGITS),
        "places": [
            round(float(behind[places == place].mean()), DIGITS)
            for place in range(PLACES)
        ],
        "held": scored.held and round(scored.held, DIGITS),
    }
