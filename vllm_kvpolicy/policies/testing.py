"""Test policies that drop nothing: `identity` and `holes` only move tokens.

Source: this project. Deviations: none.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.policies.compose import KeepAll
from vllm_kvpolicy.policies.options import BaseOptions
from vllm_kvpolicy.policies.scorers.random import mix

Block = TypeVar("Block")


class MovementPolicy(KeepAll):
    """Keeps every token and shuffles the survivors of each head."""

    source = "test policy, this project"

    class Options(BaseOptions):
        ragged: bool = Field(
            False, description="also swap pages between all heads and layers"
        )

    def shuffled(
        self, pages: Tensor, sources: Tensor, num_tokens: int, seeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return pages and survivors in another order.

        Args:
            pages: [E, C] int64, page lists after the event.
            sources: [E, M] int64, head * T + token that each place of the lists
                receives; negative after the last survivor.
            num_tokens: T.
            seeds: [E] int64, one per event, a pure function of the request.
        """
        moved = self.shuffle_pages(pages, seeds)
        return moved, self.shuffle(sources, sources // num_tokens, seeds)

    def shuffle(self, sources: Tensor, heads: Tensor, seeds: Tensor) -> Tensor:
        """Shuffle survivors within each head; a function of (seed, head, entry) alone.

        Args:
            sources: [E, M] int64, survivors, head by head and oldest first; negative
                entries are padding on the right.
            heads: [E, M] int64, the head that each belongs to, ascending.
            seeds: [E] int64, one per event, a pure function of the request.

        Returns:
            [E, M] int64.
        """
        draw = self._draw(sources, seeds)
        # Draws are below 2^32: heads stay in their order, and padding (a negative
        # source) stays after them.
        last = heads.amax(-1, keepdim=True) + 1
        key = torch.where(sources < 0, last, heads) * 2**32 + draw
        return sources.gather(-1, key.argsort(dim=-1, stable=True))

    def shuffle_pages(self, pages: Tensor, seeds: Tensor) -> Tensor:
        """Shuffle [E, C] pages among all heads and layers where the option says so."""
        if not self.options.ragged:
            return pages
        draw = self._draw(pages, mix(seeds))
        return pages.gather(-1, draw.argsort(dim=-1, stable=True))

    @staticmethod
    def _draw(entries: Tensor, seeds: Tensor) -> Tensor:
        entry = torch.arange(entries.shape[-1], device=entries.device)
        return mix(mix(seeds)[:, None] ^ entry)


def shuffled(
    owned: Sequence[Block], count: int, take: Callable[[int], list[Block]], seed: int
) -> list[Block]:
    """Keep a random choice of a request's own blocks, in random order.

    Args:
        owned: blocks below the frontier, in time order.
        count: blocks that the survivors need, at most `len(owned)`.
        take: takes up to n free blocks from the pool; may return fewer.
    """
    return random.Random(seed).sample(list(owned), count)


def exchanged(
    owned: Sequence[Block], count: int, take: Callable[[int], list[Block]], seed: int
) -> list[Block]:
    """Trade half of the blocks for free ones and shuffle the rest.

    With no free block in the pool this is `shuffled`, whose arguments it has.
    """
    rng = random.Random(seed)
    fresh = take(count // 2)
    blocks = fresh + rng.sample(list(owned), count - len(fresh))
    rng.shuffle(blocks)
    return blocks


class Identity(MovementPolicy):
    """Shuffles at each event."""

    summary = "keeps everything, shuffles tokens at each event"
    placement = staticmethod(shuffled)


class Holes(MovementPolicy):
    """Gives pages back and takes them again."""

    summary = "keeps everything, frees pages and takes them again"
    placement = staticmethod(exchanged)
