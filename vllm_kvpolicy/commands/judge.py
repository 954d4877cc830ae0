"""Judges what engines answered and counted: one `Check` for each thing that must hold.

Nothing here knows where answers come from: `verify_engine` asks engines of this
process, `verify_server` asks a running one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import isfinite
from random import Random

Counters = Mapping[str, float]
"""Series of `observe.metrics`, by name without prefix and suffix."""

PASSED, FAILED, OPEN = "ok", "FAILED", "open"
WORDS = (
    "river stone window paper garden silver market letter winter bridge candle forest "
    "hammer island jacket"
)


@dataclass(frozen=True)
class Answer:
    """What one request gave.

    Args:
        events: how many it had; None where it does not say so.
        close: by how many nats the best token was ahead of the next, and which that
            was, for each output token, where that was asked for.
    """

    tokens: tuple[int, ...]
    events: int | None = None
    close: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Check:
    """One thing that must hold; OPEN is the result where it could not be judged."""

    name: str
    result: str
    figures: str


def first_difference(
    expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> tuple[int, int] | None:
    """Return where tokens of the same requests first differ; None for nowhere.

    Returns:
        Index of the request, and of the first output token that is not the same, or is
        there in one list only.
    """
    for request, pair in enumerate(zip(expected, found, strict=True)):
        places = enumerate(zip_longest(*pair))
        place = next((index for index, (a, b) in places if a != b), None)
        if place is not None:
            return request, place
    return None


def widest_lead(expected: Sequence[Answer], found: Sequence[Answer]) -> float:
    """Return how far apart two tokens are, at most, that have changed places.

    In half precision sums in another order choose another of two tokens that are level.
    Behind that answers are of different texts.

    Returns:
        Nats; 0 where no answer differs, infinity where one has anything but stock's
        second best token, or `close` is not known.
    """
    leads = [0.0]
    for answer, other in zip(expected, found, strict=True):
        place = first_difference([answer.tokens], [other.tokens])
        if place is None:
            continue
        lead, second = [*answer.close, *[(float("inf"), -1)] * (place[1] + 1)][place[1]]
        is_second = other.tokens[place[1] : place[1] + 1] == (second,)
        leads.append(lead if is_second else float("inf"))
    return max(leads)


def num_equal(expected: Sequence[Answer], found: Sequence[Answer]) -> int:
    """Return how many tokens come before the first difference of each request."""
    places = (
        first_difference([one.tokens], [other.tokens])
        for one, other in zip(expected, found, strict=True)
    )
    return sum(
        len(answer.tokens) if place is None else place[1]
        for answer, place in zip(expected, places, strict=True)
    )


def growth(before: Counters, after: Counters) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def same_tokens(
    name: str,
    expected: Sequence[Answer],
    found: Sequence[Answer],
    grown: Counters,
    *,
    has_events: bool,
    level: float = 0.0,
) -> Check:
    """Judge whether requests gave the tokens that they should.

    A comparison of requests that had no event says nothing about events, and one of
    requests that had some nothing about the time before: both fail.

    Args:
        has_events: whether they must have had events, else they must have none.
        level: nats; two tokens closer than this may change places.
    """
    events = grown["events"]
    count = sum(len(answer.tokens) for answer in found)
    figures = f"{len(found)} requests, {count} tokens, {events:.0f} events"
    place = first_difference([a.tokens for a in expected], [a.tokens for a in found])
    lead = widest_lead(expected, found)
    if place is not None and lead < level:
        equal = num_equal(expected, found)
        figures += f", {equal} before two level ones changed places ({lead:.2f} nats)"
    elif place is not None:
        told = f"request {place[0]} differs from output token {place[1]} on"
        return Check(name, FAILED, f"{told}; {figures}")
    if has_events != (events > 0):
        wanted = "some" if has_events else "none"
        return Check(name, FAILED, f"{figures}, expected {wanted}")
    return Check(name, PASSED, figures)


def is_steady(level: float, most: float) -> Check:
    """Judge whether stock gives about the same answers alone as in company.

    Args:
        level: nats, by which other answers may differ from them.
    """
    figures = f"tokens closer than {level:.2f} nats count as level"
    return _check("answers do not depend on company", level <= most, figures)


def begin_alike(stock: Sequence[Answer], found: Sequence[Answer]) -> Check:
    """Judge whether first tokens are one of stock's two best: not noise, nor NaN."""
    alike = sum(
        other.tokens[0] in (answer.tokens[0], answer.close[0][1])
        and all(isfinite(lead) for lead, _ in other.close)
        for answer, other in zip(stock, found, strict=True)
    )
    name = "answers begin with one of stock's two best tokens"
    return _check(name, alike == len(stock), f"{alike} of {len(stock)} requests")


def drafts_are_taken(answers: Sequence[Answer], grown: Counters) -> Check:
    """Judge whether requests got more than a token in some of their steps."""
    count, steps = sum(len(each.tokens) for each in answers), grown["request_steps"]
    figures = f"{count} tokens in {steps:.0f} steps of requests"
    return _check("drafts are accepted", count > steps, figures)


def memory_returns(grown: Counters) -> Check:
    names = ("events", "tokens_dropped", "blocks_returned")
    events, dropped, returned = (grown[name] for name in names)
    figures = (
        f"{events:.0f} events, {dropped:.0f} tokens dropped per KV head, "
        f"{returned:.0f} superblocks returned"
    )
    holds = min(events, dropped, returned) > 0
    return _check("a policy returns memory", holds, figures)


def pool_is_free(where: str, held: int) -> Check:
    name = f"{where}: all superblocks are free at the end"
    return _check(name, held == 0, f"{held} superblocks still held")


def counters_agree(where: str, answers: Sequence[Answer], grown: Counters) -> Check:
    """Judge whether counters say of requests what their answers say."""
    counted = {"requests": grown["requests"]}
    seen: dict[str, float] = {"requests": len(answers)}
    if all(answer.events is not None for answer in answers):
        counted["events"] = grown["events"]
        seen["events"] = sum(answer.events or 0 for answer in answers)
    told = [
        f"{counted[name]:.0f} {name} counted, {seen[name]:.0f} seen" for name in seen
    ]
    name = f"{where}: counters agree with the answers"
    return _check(name, counted == seen, "; ".join(told))


def _check(name: str, holds: bool, figures: str) -> Check:
    return Check(name, PASSED if holds else FAILED, figures)


def left_open(check: Check, why: str | None) -> Check:
    """Return a check as one that could not be judged, unless there is no reason why."""
    if why is None:
        return check
    return replace(check, result=OPEN, figures=f"{why}; {check.figures}")


def until_stopped(name: str, checks: Iterator[Check]) -> Iterator[Check]:
    """Yield checks; what stops them is a failed one of that name, not the end."""
    try:
        yield from checks
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        yield Check(name, FAILED, told)


def is_healthy(checks: Sequence[Check]) -> bool:
    return all(check.result != FAILED for check in checks)


def summary(checks: Sequence[Check]) -> str:
    """Return the verdict, which says so where not everything could be judged."""
    if not is_healthy(checks):
        return "NOT HEALTHY"
    count = sum(check.result == OPEN for check in checks)
    return f"nothing failed, {count} of {len(checks)} open" if count else "healthy"


def text(seed: int, num_words: int) -> str:
    """Return a text of words and numbers, always the same for a seed and for no other.

    A tokenizer makes at least as many tokens of it as it has words.
    """
    draw, words = Random(seed), WORDS.split()
    pairs = ((draw.choice(words), str(draw.randrange(1000))) for _ in range(num_words))
    return " ".join([word for pair in pairs for word in pair][:num_words])
