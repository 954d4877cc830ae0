"""What one event takes from the block pool and gives back to it."""

from collections.abc import Callable, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Turnover:
    """The superblocks of one event: read by it, written by it, taken and given back.

    Example: a request owns a b c d e, of which a, b and c are cached, and 4 hold its
    survivors afterwards. d and e can be written; two more are taken, and a, b and c go
    back to the prefix cache.

    Args:
        owned: what the event reads, in time order.
        num_dest: how many hold survivors afterwards.
        is_writable: whether the request alone uses a block and it is not cached.
    """

    def __init__(
        self,
        owned: Sequence[KVCacheBlock],
        num_dest: int,
        is_writable: Callable[[KVCacheBlock], bool],
    ) -> None:
        self.owned, self.num_dest = owned, num_dest
        self.writable = [is_writable(block) for block in owned]
        self.num_fresh = max(num_dest - sum(self.writable), 0)

    @property
    def let_go(self) -> list[KVCacheBlock]:
        """What the request lets go without writing to it, in time order."""
        pairs = zip(self.owned, self.writable, strict=True)
        return [block for block, is_writable in pairs if not is_writable]

    @property
    def net_taken(self) -> int:
        """How many free blocks the pool has less afterwards; negative for more."""
        freed = sum(block.ref_cnt == 1 for block in self.let_go)
        surplus = sum(self.writable) + self.num_fresh - self.num_dest
        return self.num_fresh - freed - surplus

    def homes(self, fresh: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return what may be written, at least `num_dest` blocks.

        Blocks stay at their place where they can, so that survivors need not move.

        Args:
            fresh: `num_fresh` blocks that take the places of the first ones that
                cannot be written.
        """
        left, found = list(fresh), []
        for block, is_writable in zip(self.owned, self.writable, strict=True):
            if is_writable:
                found.append(block)
            elif left:
                found.append(left.pop(0))
        return found
