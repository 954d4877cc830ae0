"""What a rank of a tensor-parallel group serves, and what it needs from the others.

Every rank has some of the heads of all layers, and decides for those alone. It hears of
the others where a score is a mean over all heads of a layer, where several ranks have
copies of one KV head, and where the scheduler has to know how much of a superblock the
survivors of any rank take.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadShard:
    """The heads of each layer that a rank serves.

    With fewer KV heads than ranks, neighbouring ranks have copies of one KV head and
    share its query heads out among themselves.

    Args:
        num_heads: Hq, query heads of the whole model per layer.
        num_kv_heads: H, KV heads of the whole model per layer.
        rank: 0..size - 1.
        size: ranks of the group.

    Raises:
        ValueError: neither of KV heads and ranks divides the other.
    """

    num_heads: int
    num_kv_heads: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        heads, size = self.num_kv_heads, self.size
        if heads % size and size % heads:
            raise ValueError(
                f"tensor parallelism: got {heads} KV heads on {size} ranks, expected a "
                "multiple or a divisor"
            )

    @property
    def copies(self) -> int:
        """Ranks that have a copy of each KV head."""
        return max(1, self.size // self.num_kv_heads)

    @property
    def first_kv_head(self) -> int:
        """The first of the rank's KV heads, counted in the whole model."""
        return self.rank * self.num_kv_heads // self.size

    def kv_heads(self, tensor: Tensor, axis: int) -> Tensor:
        """Take the rank's KV heads, a view, of those of the model on `axis`."""
        count = max(1, self.num_kv_heads // self.size)
        return tensor.narrow(axis, self.first_kv_head, count)

    def query_heads(self, tensor: Tensor, axis: int) -> Tensor:
        """Take, likewise, the query heads that read the rank's KV heads.

        Those are all of a KV head's, also where other ranks compute some of them.
        """
        group = self.num_heads // self.num_kv_heads
        count = max(1, self.num_kv_heads // self.size) * group
        return tensor.narrow(axis, self.first_kv_head * group, count)


# Of a process that has all heads, however many they are.
ALL_HEADS = HeadShard(num_heads=1, num_kv_heads=1)


class Ranks:
    """What ranks hear of each other; here of one rank alone, which has nobody to ask.

    Every rank calls the same methods in the same order, with tensors of one shape.
    """

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the ranks, floating point."""
        return values

    def most(self, counts: Tensor) -> Tensor:
        """Return the largest of the ranks' integers, element by element."""
        return counts

    def queries_of_copies(self, queries: Tensor) -> Tensor:
        """Return the queries of all ranks that have copies of this rank's KV head.

        Args:
            queries: [E, L, Hq, W, D] of this rank.

        Returns:
            [E, L, Hq * copies, W, D], in the order of the model's query heads.
        """
        return queries


ONE_RANK = Ranks()
