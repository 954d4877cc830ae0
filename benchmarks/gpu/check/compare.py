"""Whether two runs of an engine gave the same tokens, and how sure that is.

Attention adds up the same numbers in another order where tokens lie elsewhere, so the
last bit of a log-probability may differ, and with it a token where the two best are
nearly level. In half precision stock beside itself shows how much that is: in another
batch, and with another attention backend, which adds up in another order. In float32
little is allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from support.engine.helpers import Run

LOGPROB = {"bfloat16": 2e-2, "float32": 1e-3}  # what rounding may change, at least
GAP = {"bfloat16": 5e-2, "float32": 2e-3}  # two best tokens closer than this are level
MOST_NOISE = 0.25  # above this nothing is proved
FEWEST_TOKENS = 4  # per request, before a first difference


@dataclass(frozen=True)
class Agreement:
    """How far a run goes along with stock.

    Args:
        same: requests with the same tokens to the end.
        tokens: before the first difference of each request, summed.
        gap: the largest distance between stock's two best log-probabilities at a first
            difference, 0 where there is none.
        worst: the largest difference between log-probabilities of tokens before it.
    """

    requests: int
    same: int
    tokens: int
    all_tokens: int
    gap: float
    worst: float

    def __str__(self) -> str:
        """Say it in a few words."""
        text = f"{self.same}/{self.requests} identical"
        if self.same < self.requests:
            text += (
                f", {self.tokens} of {self.all_tokens} tokens before a near tie "
                f"(gap {self.gap:.3f})"
            )
        return f"{text}, logprobs within {self.worst:.1e}"


def compare(run: Run, stock: Run) -> Agreement:
    """Compare all requests of two runs.

    Raises:
        AssertionError: they are not the same requests, or not of the same length.
    """
    assert run.results.keys() == stock.results.keys()
    same = tokens = 0
    gap = worst = 0.0
    for name, theirs in stock.results.items():
        ours = run.results[name]
        assert len(ours.tokens) == len(theirs.tokens), name
        steps = zip(ours.tokens, theirs.tokens, strict=True)
        differs = [place for place, (a, b) in enumerate(steps) if a != b]
        first = differs[0] if differs else len(theirs.tokens)
        same += not differs
        tokens += first
        for place in range(first):
            token = theirs.tokens[place]
            distance = ours.logprobs[place][token] - theirs.logprobs[place][token]
            worst = max(worst, abs(distance))
        if differs:
            best, second = sorted(theirs.logprobs[first].values(), reverse=True)[:2]
            gap = max(gap, best - second)
    total = sum(len(result.tokens) for result in stock.results.values())
    return Agreement(len(stock.results), same, tokens, total, gap, worst)


def assert_same(found: Agreement) -> None:
    """Raise unless all tokens are stock's: the same kernels on the same tables."""
    assert found.same == found.requests, str(found)


def assert_alike(found: Agreement, noises: Sequence[Agreement], dtype: str) -> None:
    """Raise unless differences are no larger than those of stock beside itself.

    Args:
        noises: stock in other circumstances beside stock.
    """
    logprob = LOGPROB[dtype]
    for noise in noises:
        assert noise.worst <= MOST_NOISE, f"stock beside itself: {noise}"
        logprob = max(logprob, 2 * noise.worst)
    gap = max(GAP[dtype], 2 * logprob)
    assert found.worst <= logprob, f"{found}; allowed {logprob:.1e}"
    assert found.gap <= gap, f"{found}; a near tie is below {gap:.3f}"
    assert found.tokens >= FEWEST_TOKENS * found.requests, str(found)
