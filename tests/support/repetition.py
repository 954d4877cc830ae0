"""Requests that repeat themselves, and what becomes of drafts in them."""

import random
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest

from support.engine.helpers import FIRST_TOKEN, LAST_TOKEN, Engine, Prompt

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
# Up to 24 tokens, vLLM's default.
SUFFIX = {"method": "suffix"}
needs_suffix = pytest.mark.skipif(
    find_spec("arctic_inference") is None,
    reason="suffix trees need `pip install arctic-inference==0.1.1`",
)
METHODS = [
    pytest.param(SPECULATION, id="ngram"),
    pytest.param(SUFFIX, id="suffix", marks=needs_suffix),
]


@dataclass
class Drafts:
    """What became of drafts.

    Args:
        drafted: tokens that were speculated, by job.
        accepted: those of them that were right.
        interrupted: requests that were preempted with drafts waiting.
    """

    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    interrupted: int = 0

    @property
    def count(self) -> int:
        """Tokens that were speculated."""
        return sum(self.drafted.values())

    @property
    def share(self) -> float:
        """How many of all drafts were right."""
        return sum(self.accepted.values()) / self.count


def watch_drafts(engine: Engine) -> Drafts:
    """Count drafts from now on."""
    found, scheduler = Drafts(), engine.scheduler
    count, preempt = scheduler.make_spec_decoding_stats, scheduler._preempt_request

    def counted(stats: Any, **numbers: Any) -> Any:
        name = numbers["request_id"].rsplit("-", 1)[0]
        for key in ("draft", "accepted"):
            of_all = found.drafted if key == "draft" else found.accepted
            of_all[name] = of_all.get(name, 0) + numbers[f"num_{key}_tokens"]
        return count(stats, **numbers)

    def preempted(request: Any, *args: Any, **options: Any) -> None:
        found.interrupted += bool(request.spec_token_ids)
        preempt(request, *args, **options)

    scheduler.make_spec_decoding_stats = counted
    scheduler._preempt_request = preempted
    return found


def repetitive(seed: int, length: int) -> Prompt:
    """Return a prompt that repeats eleven tokens, with a tenth of them replaced."""
    rng = random.Random(seed)
    unit = [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(11)]
    return [
        unit[place % 11] if rng.random() < 0.9 else rng.randint(FIRST_TOKEN, LAST_TOKEN)
        for place in range(length)
    ]
