"""A made-up language model behind the benchmark's Asker, and a tokenizer of words."""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.language.engines import Asker

FIRST = 0
NEWLINE = 1

Predict = Callable[[str, int, tuple[int, ...]], dict[int, float]]
"""(policy, budget, tokens so far) -> log p of some tokens, nats."""


class Words:
    """Gives each word, with the space before it, and each sign a number."""

    def __init__(self) -> None:
        self.numbers = {"": FIRST, "\n": NEWLINE}

    def encode(self, text: str) -> list[int]:
        found = re.findall(r" ?\w+|\n| ?[^\w\n]", text)
        return [self.numbers.setdefault(one, len(self.numbers)) for one in found]

    def decode(self, token_ids: Sequence[int]) -> str:
        words = {number: word for word, number in self.numbers.items()}
        return "".join(words[token] for token in token_ids)


class MadeUpAsker(Asker):
    """Answers like vLLM with the predictions of a function.

    Attributes:
        asked: (policy, budget, number of prompts) of each call.
        dropped: what each answer says of its events.
    """

    def __init__(self, predict: Predict) -> None:
        super().__init__(None, 256)
        self.predict = predict
        self.asked: list[tuple[str, int, int]] = []
        self.dropped: list[list[float]] = []

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        policy: str,
        budget: int,
        salts: Sequence[str] = (),
        **sampling: Any,
    ) -> list[Any]:
        """Return what `predict` says of each prompt and of what follows it."""
        self.asked.append((policy, budget, len(prompts)))
        return [self._output(tuple(one), policy, budget, sampling) for one in prompts]

    def _output(
        self, prompt: tuple[int, ...], policy: str, budget: int, sampling: dict
    ) -> Any:
        said = prompt
        for _ in range(sampling["max_tokens"]):
            found = self.predict(policy, budget, said)
            said = (*said, max(found, key=lambda token: found[token]))
        answer = SimpleNamespace(token_ids=list(said[len(prompt) :]))
        entries = None
        if "prompt_logprobs" in sampling:
            entries = [None] + [
                _named(
                    self.predict(policy, budget, prompt[:place]),
                    prompt[place],
                    sampling["prompt_logprobs"],
                )
                for place in range(1, len(prompt))
            ]
        return SimpleNamespace(
            outputs=[answer],
            prompt_logprobs=entries,
            num_cached_tokens=0,
            kv_transfer_params={"kv_policy": {"dropped": self.dropped}},
        )


def _named(found: dict[int, float], own: int, top: int) -> dict[int, Any]:
    """Return the most probable tokens and the prompt's own, as vLLM does."""
    tokens = sorted(found, key=lambda token: -found[token])[:top]
    return {
        token: SimpleNamespace(logprob=found[token])
        for token in dict.fromkeys([own, *tokens])
    }
