"""Two questions about one text: the second in the same conversation, and alone.

A problem of `tasks` asks two of its questions, as requests to an engine that is set up
as a server is by default: prefix caching is on, and the event is at the prompt's end,
so that the policy has seen the question when it chooses. The second question is asked
twice: behind the first question and the answer that was given, whose prompt begins with
what the first request has computed, and behind the text alone in a request that finds
nothing in the prefix cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.language.engines import Asker
from benchmarks.language.losses import DIGITS
from benchmarks.language.tasks import Ids, Problem


@dataclass(frozen=True)
class Turns:
    """What was answered.

    Attributes:
        is_first_right: whether the first question was answered right.
        is_right: whether the second one was, in the conversation.
        is_right_alone: whether it was, alone.
        cached: share of the second prompt's tokens that the prefix cache had.
        first_held: tokens of the shortest prompt.
    """

    is_first_right: bool
    is_right: bool
    is_right_alone: bool
    cached: float
    first_held: int


def measure(
    asker: Asker, policy: str, budget: int, items: Sequence[Problem]
) -> list[Turns]:
    """Return what is answered to two questions of each problem.

    Args:
        asker: of an engine with prefix caching.
    """
    first = [one.text_ids + one.asked[0][0] for one in items]
    opened = _ask(asker, policy, budget, items, 0, first, "talk")
    talks = [
        prompt + said + one.asked[1][0]
        for prompt, (said, _), one in zip(first, opened, items, strict=True)
    ]
    second = _ask(asker, policy, budget, items, 1, talks, "talk")
    alone = [one.text_ids + one.asked[1][0] for one in items]
    single = _ask(asker, policy, budget, items, 1, alone, "alone")
    return [
        Turns(
            opened[number][0] == one.asked[0][1],
            second[number][0] == one.asked[1][1],
            single[number][0] == one.asked[1][1],
            second[number][1] / len(talks[number]),
            min(len(first[number]), len(alone[number])),
        )
        for number, one in enumerate(items)
    ]


def _ask(
    asker: Asker,
    policy: str,
    budget: int,
    items: Sequence[Problem],
    question: int,
    prompts: Sequence[Ids],
    cache: str,
) -> list[tuple[Ids, int]]:
    """Return answers as long as the right ones, and tokens that the cache had.

    Policies and budgets have prefix caches of their own.
    """
    length = max(len(one.asked[question][1]) for one in items)
    salts = [f"{policy}/{budget}/{one.id}/{cache}" for one in items]
    outputs = asker.ask(
        prompts, policy, budget, salts=salts, max_tokens=length, ignore_eos=True
    )
    return [
        (
            tuple(output.outputs[0].token_ids)[: len(one.asked[question][1])],
            output.num_cached_tokens,
        )
        for output, one in zip(outputs, items, strict=True)
    ]


def figures(turns: Turns, budget: int, interval: int) -> dict[str, Any]:
    """Return what is kept of the answers.

    Returns:
        `first_right`, `second_right` and `alone_right`, 1 or 0, and `cached`.

    Raises:
        ValueError: a prompt does not end in an event.
    """
    if turns.first_held < budget + interval:
        raise ValueError(
            f"budget: got {budget} with interval {interval}, expected at most "
            f"{turns.first_held} together, the tokens of a prompt"
        )
    return {
        "first_right": int(turns.is_first_right),
        "second_right": int(turns.is_right),
        "alone_right": int(turns.is_right_alone),
        "cached": round(turns.cached, DIGITS),
    }
