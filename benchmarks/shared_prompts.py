"""Makes requests whose prompts begin alike: prefixes in common, turns of conversations.

Their contents are new in every round, so that a round finds nothing of another one in
a prefix cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from benchmarks.load import Played, Sample, run_conversations, run_together
from benchmarks.workload import blocks_needed


class Requests(Protocol):
    """What a round of a comparison needs to know of its requests."""

    async def play(self, url: str, round_number: int, sample: Sample) -> Played:
        """Send the requests of a round to a server and wait for the last token."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Requests in random order that share a few prefixes, as vLLM's prefix_repetition.

    Attributes:
        token_ids: prompts are drawn from these.
        prefixes: how many there are; requests are spread over them evenly.
        prefix_tokens: length of each.
        suffix_tokens: of a prompt, behind its prefix.
        counts_up: prompts are not drawn token by token but follow one another in
            `token_ids`, from a random one on, as those of vLLM's data set `random`.
    """

    token_ids: tuple[int, ...]
    prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    requests: int
    at_once: int
    seed: int
    counts_up: bool = False

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Length of each prompt."""
        return (self.prefix_tokens + self.suffix_tokens,) * self.requests

    @property
    def longest(self) -> int:
        """Tokens of a whole request."""
        return self.prefix_tokens + self.suffix_tokens + self.output_tokens

    def prompts(self, round_number: int) -> list[list[int]]:
        """Return the prompts of a round, as token ids."""
        rng = random.Random(f"{self.seed}/prefixes/{round_number}")

        def draw(tokens: int) -> list[int]:
            ids = self.token_ids
            if not self.counts_up:
                return rng.choices(ids, k=tokens)
            first = rng.randrange(len(ids))
            return [ids[(first + i) % len(ids)] for i in range(tokens)]

        starts = [draw(self.prefix_tokens) for _ in range(self.prefixes)]
        prompts = [
            starts[number % self.prefixes] + draw(self.suffix_tokens)
            for number in range(self.requests)
        ]
        rng.shuffle(prompts)
        return prompts

    def needed_blocks(self, block_size: int) -> int:
        """Return the blocks that all requests at once need if they share none."""
        whole = blocks_needed(self.prompt_tokens[:1], self.output_tokens, block_size)
        return min(self.at_once, self.requests) * whole

    def few(self) -> "SharedPrefixes":
        """Return two requests with one prefix, one after the other."""
        return replace(self, prefixes=1, requests=2, at_once=1)

    async def play(
        self,
        url: str,
        round_number: int,
        sample: Sample,
        extra: dict[str, Any] | None = None,
    ) -> Played:
        """Send the requests of a round; see load.run_together."""
        return await run_together(
            url,
            self.prompts(round_number),
            self.output_tokens,
            sample,
            at_once=self.at_once,
            extra=extra,
        )


@dataclass(frozen=True)
class Conversations:
    """Conversations with a model that thinks before it answers.

    The thinking is the first part of each output, and later prompts leave it out, as
    the chat templates of such models do.

    Attributes:
        token_ids: messages are drawn from these.
        first_tokens: the first prompt: instructions, a document, a question.
        message_tokens: each later message of the user.
        output_tokens: forced length of thinking and answer.
        thinking_tokens: of these, left out of later prompts.
    """

    token_ids: tuple[int, ...]
    conversations: int
    turns: int
    first_tokens: int
    message_tokens: int
    output_tokens: int
    thinking_tokens: int
    seed: int

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Length of a conversation's prompt in each turn."""
        more = self.output_tokens - self.thinking_tokens + self.message_tokens
        return tuple(self.first_tokens + more * turn for turn in range(self.turns))

    @property
    def longest(self) -> int:
        """Tokens of the last request of a conversation."""
        return self.prompt_tokens[-1] + self.output_tokens

    @property
    def at_once(self) -> int:
        """Most requests in flight."""
        return self.conversations

    def messages(self, round_number: int) -> list[Sequence[list[int]]]:
        """Return the user's messages of each conversation of a round, as token ids."""
        rng = random.Random(f"{self.seed}/turns/{round_number}")
        lengths = [self.first_tokens] + [self.message_tokens] * (self.turns - 1)
        return [
            [rng.choices(self.token_ids, k=tokens) for tokens in lengths]
            for _ in range(self.conversations)
        ]

    def needed_blocks(self, block_size: int) -> int:
        """Return the blocks that stock holds when all are in their last turn."""
        last = self.prompt_tokens[-1:] * self.conversations
        return blocks_needed(last, self.output_tokens, block_size)

    def few(self) -> "Conversations":
        """Return one conversation."""
        return replace(self, conversations=1)

    async def play(
        self,
        url: str,
        round_number: int,
        sample: Sample,
        extra: dict[str, Any] | None = None,
    ) -> Played:
        """Hold the conversations of a round; see load.run_conversations."""
        return await run_conversations(
            url,
            self.messages(round_number),
            self.output_tokens,
            self.thinking_tokens,
            sample,
            extra,
        )


Cached = SharedPrefixes | Conversations
"""Requests whose prompts begin alike."""
