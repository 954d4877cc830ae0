"""Sizes of what is allocated along with the KV cache, known before it is made.

vLLM measures free memory before it makes the KV cache. Tables whose size follows from
the number of superblocks are allocated later, so the pool must leave room for them.
"""

from bisect import bisect_right
from dataclasses import dataclass

from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.head_tables import HeadTables

# Kinds of these tables.
VALUES = "values of kept tokens"
PAGES = "decisions and bounds of pages"
LISTS = "page lists of heads"


@dataclass(frozen=True)
class SideTables:
    """What a worker allocates once the number of superblocks of the pool is known.

    Args:
        num_requests: requests that may be live at once.
        num_heads: n = L * H on this rank.
        block_size: N, tokens per superblock.
        max_global_blocks: most superblocks of survivors of one request in any pool.
        max_local_tokens: most local tokens right after an event, per head.
        num_memories: values that are remembered of each survivor.
        is_ragged: whether heads have page lists of their own.
        page_bytes: bytes for each head page, of captures and page bounds.
    """

    num_requests: int
    num_heads: int
    block_size: int
    max_global_blocks: int
    max_local_tokens: int
    num_memories: int
    is_ragged: bool
    page_bytes: int = 0

    def global_blocks(self, num_blocks: int) -> int:
        """Return the most superblocks of survivors of one request in a pool."""
        return min(self.max_global_blocks, num_blocks)

    def parts(self, num_blocks: int) -> dict[str, int]:
        """Return the bytes of each kind of these, with a pool of `num_blocks`."""
        each = SurvivorMemory.nbytes_of(
            self.num_requests,
            num_blocks,
            self.num_heads,
            self.block_size,
            self.max_local_tokens,
        )
        longest = self.global_blocks(num_blocks)
        # One more row is for requests without an event.
        lists = HeadTables.nbytes(self.num_requests + 1, longest, self.num_heads)
        return {
            VALUES: self.num_memories * each,
            PAGES: num_blocks * self.num_heads * self.page_bytes,
            LISTS: lists * self.is_ragged,
        }

    def nbytes(self, num_blocks: int) -> int:
        """Return the bytes that these take with a pool of `num_blocks` superblocks."""
        return sum(self.parts(num_blocks).values())

    def pool_blocks(self, available: int, superblock_bytes: int) -> int:
        """Return how many superblocks fit together with these tables.

        Args:
            available: bytes for the KV cache and these tables together.
            superblock_bytes: of all layers.
        """

        def total(num_blocks: int) -> int:
            return num_blocks * superblock_bytes + self.nbytes(num_blocks)

        most = max(available, 0) // superblock_bytes
        return max(bisect_right(range(most + 1), available, key=total) - 1, 0)
