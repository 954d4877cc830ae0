"""Learns how long answers are, from those that this engine has given.

A request may ask for 32,768 tokens and stop after 300. Source: the product-limit
estimate of Kaplan and Meier (1958): answers that are cut off at `max_tokens`, or not
finished yet, say only that they are longer. Deviations: none.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.request import Request, RequestStatus

REMEMBERED = 512  # answers
ENOUGH = 20  # answers, before anything is concluded from them
OUTLIVING = 0.1  # share of answers that may be longer than expected
# Tokens that an answer is expected to go on for as long as few are known.
LOOKAHEAD = 256


@dataclass
class OutputLengths:
    """The newest answers, and what they say about the next ones.

    Args:
        unfinished: returns the lengths so far of answers that go on.
    """

    unfinished: Callable[[], Iterable[int]] = tuple
    # Length in tokens, and whether the answer stopped by itself.
    _seen: deque[tuple[int, bool]] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED)
    )
    # What `_estimate` returned, None where answers have been added since.
    _curve: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, length: int, stopped: bool) -> None:
        """Take in an answer of `length` tokens; not `stopped` at `max_tokens`.

        One without tokens says nothing: its client left before it began.
        """
        if length:
            self._seen.append((length, stopped))
            self._curve = None

    def learn_from(self, request: Request) -> None:
        """Take in the answer of a request that has ended, if it could have stopped."""
        if RequestStatus.is_finished(request.status) and may_stop(request):
            stopped = request.status != RequestStatus.FINISHED_LENGTH_CAPPED
            self.add(request.num_output_tokens, stopped)

    def expected_of(self, request: Request) -> int:
        """Return how many tokens a request's answer is expected to have."""
        if not may_stop(request):
            return request.max_tokens
        expected = self.expected(request.num_output_tokens, request.max_tokens)
        return max(expected, request.sampling_params.min_tokens)

    def expected(self, generated: int, most: int) -> int:
        """Return the length that nine in ten answers do not exceed.

        While few are known it is a little more than what there is: requests are let in
        nearly as vLLM does, which is right for short answers and put right by
        preemption for long ones.

        Args:
            generated: tokens that this one has already.
            most: its `max_tokens`.

        Returns:
            More than `generated` unless that is `most`, and at most `most`.
        """
        if len(self._seen) < ENOUGH:
            return min(generated + LOOKAHEAD, most)
        if self._curve is None:
            self._curve = self._estimate()
        lengths, shares = self._curve
        passed = np.searchsorted(lengths, generated, side="right")
        now = shares[passed - 1] if passed else 1.0
        rare = np.flatnonzero(shares[passed:] <= OUTLIVING * now)
        return min(int(lengths[passed + rare[0]]), most) if len(rare) else most

    def _estimate(self) -> tuple[np.ndarray, np.ndarray]:
        """Return lengths at which answers stopped, and the share that got further."""
        seen = [*self._seen, *((length, False) for length in self.unfinished())]
        # Those that were cut off at a length were there when others stopped at it.
        order = sorted(seen, key=lambda answer: (answer[0], not answer[1]))
        lengths = np.array([length for length, _ in order], np.int64)
        stopped = np.array([stops for _, stops in order], bool)
        at_risk = np.arange(len(order), 0, -1)
        shares = np.cumprod(np.where(stopped, 1 - 1 / at_risk, 1.0))
        return lengths[stopped], shares[stopped]


def may_stop(request: Request) -> bool:
    """Return whether an answer may end before `max_tokens`."""
    params = request.sampling_params
    if params is None:
        return False
    return not params.ignore_eos or bool(params.stop or params.stop_token_ids)
