"""Agreement with full KV on what follows the beginnings of texts.

Full KV answers each prompt greedily; end-of-text tokens end nothing. A policy is
compared with it twice. Its own greedy answer shows where it first differs; after that
the two have different words before them. Then both read prompt and full KV's answer as
one prompt, and the next-token distributions p (full KV) and q (policy) are compared at
each place of the answer by KL(p || q). vLLM names the TOP most probable tokens of each:
tokens that both name are a class each, all others together are one more. Merging
classes never raises a KL divergence (data-processing inequality), so what is measured
is a lower bound of the true one.

Events of a prompt are at multiples of the interval. A policy's own answer has events
while it is decoded, which are at the same positions if the budget is a multiple of the
interval. If not, and if the prompt is too short for an event, they are at the budget
plus multiples of the interval: budget 320 and interval 256 have events at 512 and 768
in the prompt, and at 576 and 832 in decoding. Each comparison counts from its own first
event on. In bf16 the two ways of computing differ by rounding, and so does a second run
of full KV: its own row shows how much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import FULL
from benchmarks.language.engines import Asker, predictions
from benchmarks.language.losses import DIGITS, first_event
from benchmarks.language.texts import Text
from vllm_kvpolicy.events import EventPlan

PROMPT = 512
"""Tokens of a text that are given."""
ANSWER = 512
"""Tokens that follow."""
TOP = 20
ANSWERED = "answer_ids"
"""In lines of FULL: the tokens of its answer."""
SMALLEST = 1e-6
"""Least probability of a class: a float32 sum of the others is no closer to 1."""

Distribution = Mapping[int, float]
"""Token id -> log p, nats, of some tokens."""


@dataclass(frozen=True)
class Reference:
    """A prompt and what full KV says after it.

    Attributes:
        prompt_ids: [PROMPT] tokens.
        answer_ids: [ANSWER] tokens.
        distributions: what full KV predicts for each token of the answer, read as part
            of a prompt.
    """

    id: str
    kind: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    distributions: tuple[Distribution, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt_ids + self.answer_ids

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of prompt and answer."""
        return sha256(repr(self.token_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Agreement:
    """How a policy's answer and predictions compare with full KV's.

    Attributes:
        is_same: whether the policy's own answer has the same token, [ANSWER].
        divergence: lower bound of KL(full || policy), [ANSWER], nats.
        is_top: whether the token that full KV finds most probable is the policy's,
            [ANSWER].
    """

    is_same: np.ndarray
    divergence: np.ndarray
    is_top: np.ndarray


def prepare(
    asker: Asker, texts: Sequence[Text], told: Mapping[str, Line]
) -> list[Reference]:
    """Return what full KV says after the first tokens of texts.

    Args:
        asker: an engine that runs FULL.
        texts: of at least PROMPT tokens.
        told: lines of FULL in the output file, by id of the text. Their answers are
            those that lines so far are compared with; two runs of full KV may differ.

    Raises:
        ValueError: a text is shorter.
    """
    for text in texts:
        if len(text.token_ids) < PROMPT:
            raise ValueError(
                f"text-tokens: got {len(text.token_ids)}, expected at least {PROMPT}"
            )
    prompts = [text.token_ids[:PROMPT] for text in texts]
    known = {
        text.id: tuple(told[text.id][ANSWERED])
        for text in texts
        if ANSWERED in told.get(text.id, {})
    }
    asked = [text for text in texts if text.id not in known]
    if asked:
        new = _answers(asker, [text.token_ids[:PROMPT] for text in asked], FULL, 0)
        known |= dict(zip([text.id for text in asked], new, strict=True))
    answers = [known[text.id] for text in texts]
    whole = [one + two for one, two in zip(prompts, answers, strict=True)]
    found = predictions(asker, whole, FULL, 0, TOP)
    return [
        Reference(text.id, text.kind, prompt, answer, tuple(one.entries[-ANSWER:]))
        for text, prompt, answer, one in zip(
            texts, prompts, answers, found, strict=True
        )
    ]


def measure(
    asker: Asker, policy: str, budget: int, items: Sequence[Reference]
) -> list[Agreement]:
    """Return how a policy agrees with each reference.

    Args:
        policy: one of its policies, or FULL for a second run of it.
    """
    answers = _answers(asker, [item.prompt_ids for item in items], policy, budget)
    found = predictions(asker, [item.token_ids for item in items], policy, budget, TOP)
    return [
        _agreement(item, answer, one.entries[-ANSWER:])
        for item, answer, one in zip(items, answers, found, strict=True)
    ]


def _answers(
    asker: Asker, prompts: Sequence[tuple[int, ...]], policy: str, budget: int
) -> list[tuple[int, ...]]:
    outputs = asker.ask(prompts, policy, budget, max_tokens=ANSWER, ignore_eos=True)
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    if any(len(answer) != ANSWER for answer in answers):
        raise RuntimeError(
            f"answers: got {[len(answer) for answer in answers]} tokens, "
            f"expected {ANSWER} of each"
        )
    return answers


def _agreement(
    item: Reference, answer: Sequence[int], entries: Sequence[Distribution]
) -> Agreement:
    pairs = list(zip(item.distributions, entries, strict=True))
    return Agreement(
        np.array(answer) == np.array(item.answer_ids),
        np.array([divergence(full, policy) for full, policy in pairs]),
        np.array([_likeliest(full) == _likeliest(policy) for full, policy in pairs]),
    )


def _likeliest(distribution: Distribution) -> int:
    return max(distribution, key=lambda token: distribution[token])


def divergence(full: Distribution, policy: Distribution) -> float:
    """Return KL(full || policy) over the tokens that both name, and all others as one.

    Args:
        full: log p of some tokens.
        policy: log q of some tokens.

    Returns:
        Nats; at most the divergence of the whole distributions.
    """
    shared = sorted(full.keys() & policy.keys())
    p, q = (_classes([one[token] for token in shared]) for one in (full, policy))
    return float(np.sum(p * np.log(p / q)))


def _classes(logs: Sequence[float]) -> np.ndarray:
    """Return probabilities of some tokens and of all others, [tokens + 1]."""
    named = np.exp(np.array(logs, dtype=np.float64))
    return np.maximum(np.append(named, 1 - named.sum()), SMALLEST)


def first_affected(event: int) -> int:
    """Return the first place of an answer that is predicted behind an event.

    The event at p is before the token at p is computed, which predicts the one at
    p + 1.

    >>> first_affected(768), first_affected(512), first_affected(256)
    (257, 1, 0)
    """
    return max(event + 1 - PROMPT, 0)


def figures(agreement: Agreement, budget: int, interval: int) -> dict[str, Any]:
    """Return what is kept of an agreement.

    Returns:
        `first`: place in the answer at which the policy's own first differs, ANSWER if
        it does not; `equal`: share of the answer's tokens, from the first event in
        decoding on, that are the same; `kl`: mean divergence, nats, and `top`: share of
        places with the same most probable token, from the first event in the prompt on.

    Raises:
        ValueError: there is no event before the answer's end.
    """
    plan = EventPlan(PROMPT, budget, interval, prefill_interval=interval)
    own = first_affected(plan.next_event(0))
    forced = first_affected(first_event(budget, interval))
    if max(own, forced) >= ANSWER:
        raise ValueError(
            f"budget: got {budget} with interval {interval}, expected an event before "
            f"position {PROMPT + ANSWER - 1}"
        )
    differing = np.flatnonzero(~agreement.is_same)
    return {
        "first": int(differing[0]) if differing.size else ANSWER,
        "equal": round(float(agreement.is_same[own:].mean()), DIGITS),
        "kl": round(float(agreement.divergence[forced:].mean()), DIGITS),
        "top": round(float(agreement.is_top[forced:].mean()), DIGITS),
    }
