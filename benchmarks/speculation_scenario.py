"""Defines the scenario in which all servers speculate: n-grams of repetitive text.

What does a policy give beside stock vLLM with the same drafts, with room for all
requests and in a pool that is too small for them?
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.caching_scenarios import CachingScenario
from benchmarks.columns import SPECULATION_COLUMNS, SPECULATION_RATIOS
from benchmarks.shared_prompts import SharedPrefixes
from benchmarks.workload import ordinary_token_ids


@dataclass(frozen=True)
class RepeatedUnits(SharedPrefixes):
    """Requests whose prompts repeat a few tokens each; see SharedPrefixes."""

    unit_tokens: int = 24

    def prompts(self, round_number: int) -> list[list[int]]:
        """Return the prompts of a round, as token ids."""
        rng = random.Random(f"{self.seed}/units/{round_number}")
        units = [
            rng.choices(self.token_ids, k=self.unit_tokens)
            for _ in range(self.prefixes)
        ]
        length = self.prefix_tokens
        return [
            (units[number % self.prefixes] * length)[:length]
            for number in range(self.requests)
        ]


@dataclass(frozen=True)
class Speculation(CachingScenario):
    """Requests at once with nothing in common, on servers that draft n-grams.

    Attributes:
        unit_tokens: tokens that a prompt repeats.
        drafts: tokens that are speculated at most in a step.
    """

    columns: ClassVar = SPECULATION_COLUMNS
    ratio_columns: ClassVar = SPECULATION_RATIOS
    lengths: ClassVar = ("--prompt-tokens", "--output-tokens")

    output_tokens: int = 600
    budget: int = 256
    interval: int = 64
    shares: tuple[float, ...] = (1.5, 0.4)
    requests: int = 8
    prompt_tokens: int = 200
    unit_tokens: int = 24
    drafts: int = 4

    def kinds(self) -> dict[str, list[str]]:
        """Return kind of server -> arguments that only it has; policies come first."""
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": self.drafts,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
        words = ["--speculative-config", json.dumps(speculation)]
        return {name: [*own, *words] for name, own in super().kinds().items()}

    def workload(self, model: Path) -> RepeatedUnits:
        """Return the requests."""
        return RepeatedUnits(
            token_ids=ordinary_token_ids(model),
            prefixes=self.requests,
            prefix_tokens=self.prompt_tokens,
            suffix_tokens=0,
            output_tokens=self.output_tokens,
            requests=self.requests,
            at_once=self.requests,
            seed=self.seed,
            unit_tokens=self.unit_tokens,
        )


SPECULATION_SCENARIOS = {"speculation": Speculation(name="speculation")}
