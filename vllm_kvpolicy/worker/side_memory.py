"""Says what a policy's memory beside the KV cache is for, where too little is left."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_kvpolicy.policies.base import Needs, Policy
from vllm_kvpolicy.worker.captures.capture import Capture
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.captures.token_signals import TokenSignals
from vllm_kvpolicy.worker.captures.visible_until import VisibleUntil

MIB = 2**20
SMALL = 0.01  # of the whole: smaller parts are not named
# What captures hold before the KV cache is made, and which policies read it.
READ: Mapping[type[Capture], tuple[str, Callable[[Needs], object]]] = {
    QueryWindows: ("places of queries", lambda needs: needs.window_tokens),
    TokenSignals: ("signals of tokens", lambda needs: needs.signals),
    VisibleUntil: ("decisions about tokens", lambda needs: needs.until),
}


@dataclass(frozen=True)
class Share:
    """A part of the memory beside the KV cache.

    Args:
        what: is stored there.
        nbytes: that it takes.
        policies: names of those that need it.
    """

    what: str
    nbytes: int
    policies: tuple[str, ...]

    def __str__(self) -> str:
        """Return the share in words."""
        return f"{self.what} {mib(self.nbytes)} for {', '.join(self.policies)}"


def of_captures(
    captures: Iterable[Capture], policies: Mapping[str, Policy]
) -> list[Share]:
    """Return what captures hold before the KV cache is made."""
    shares = []
    for capture in captures:
        what, reads = READ[type(capture)]
        names = tuple(name for name, each in policies.items() if reads(each.needs))
        shares.append(Share(what, capture.nbytes, names))
    return shares


def mib(nbytes: float) -> str:
    """Return a number of bytes in MiB, below 1 MiB with three digits."""
    size = nbytes / MIB
    return f"{size:,.1f} MiB" if size >= 1 or not size else f"{size:.3g} MiB"


def too_small(
    available: int,
    superblocks: tuple[int, int],
    superblock_bytes: int,
    shares: Sequence[Share],
    enough: int,
) -> str:
    """Return the error of a pool in which not even one request fits.

    Args:
        available: bytes for the KV cache and what is beside it.
        superblocks: that fit, and that one request of --max-model-len may hold.
        superblock_bytes: of all layers.
        shares: of what is beside the KV cache.
        enough: bytes that would be.
    """
    beside = sum(share.nbytes for share in shares)
    named = [share for share in shares if share.nbytes > SMALL * beside]
    parts = "; ".join(map(str, sorted(named, key=lambda share: -share.nbytes)))
    fit, wanted = superblocks
    names = {name for share in shares for name in share.policies}
    allowed = "take policies out of `allow`, " if len(names) > 1 else ""
    return (
        f"KV cache memory: of {mib(available)}, --kv-policy takes {mib(beside)} for "
        f"tables ({parts}), and the other {mib(max(available - beside, 0))} hold {fit} "
        f"superblocks of {mib(superblock_bytes)}, expected at least {wanted + 1}: "
        f"{wanted} that one request of --max-model-len tokens may hold, and vLLM's "
        f"null block; give at least {mib(enough + MIB / 20)} (such as by "
        f"--kv-cache-memory-bytes), {allowed}lower --max-num-seqs for smaller tables, "
        "or lower --kv-budget, --kv-interval, prefill_interval or --max-model-len"
    )
