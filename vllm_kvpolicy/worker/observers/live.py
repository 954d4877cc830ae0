"""What a worker tells of its events while somebody listens.

Each rank of a tensor-parallel group has a ring for the events of its heads.
"""

import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_kvpolicy.observe.measures import kept_by_bin
from vllm_kvpolicy.observe.metrics import only_observes
from vllm_kvpolicy.observe.shared_files import RANK, Ring
from vllm_kvpolicy.observe.snapshots import MOST_TOKENS
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch, Destinations
from vllm_kvpolicy.worker.observers.positions import Followed, TruePositions

NUM_BINS = 64
SHARE = 0.05  # of a worker's time that telling of events may take
MOST_SECONDS = 0.5  # that may be taken at once after a quiet time


class LiveEvents:
    """Summarises events for whoever listens.

    Args:
        place: of this rank's heads among those of all `ranks` whose heads differ.
        shape: (L, H) of this rank.
        with_text: the share of each token is told as well.
        on_off: hears of it where this has failed and tells no more.
    """

    def __init__(
        self,
        engine: str,
        place: int,
        ranks: int,
        block_size: int,
        shape: tuple[int, int],
        with_text: bool,
        on_off: Callable[[], None],
    ) -> None:
        self.on_off = on_off
        self.ring = Ring(RANK.format(engine, place), create=True)
        self.place, self.ranks = place, ranks
        self.shape, self.with_text = shape, with_text
        self.positions = TruePositions(block_size)
        self._credit, self._now = MOST_SECONDS, time.monotonic()

    @only_observes
    def tell(self, batch: Batch, destinations: Destinations) -> None:
        """Write one record per event, before the tables are updated.

        Waits for the device, but only while somebody listens, and leaves events out
        that would take more than `SHARE` of the worker's time. Of a request whose
        earlier events were not followed the positions of old survivors are not known.
        """
        if not self.ring.is_heard():
            self.positions.forget()
            return
        now = time.monotonic()
        self._credit += SHARE * (now - self._now)
        self._credit, self._now = min(self._credit, MOST_SECONDS), now
        if self._credit < 0:
            self.positions.forget(batch.rows)
            return
        followed = self.positions.follow(batch, destinations)
        for event, seen in zip(batch.events, followed, strict=True):
            self.ring.append(self._summary(event, seen))
        self._credit -= time.monotonic() - now

    def _summary(self, event: CompactEvent, seen: Followed) -> dict[str, Any]:
        """Return what is told of an event, JSON-able.

        Keys beside those of `CompactEvent`:
            at: seconds since 1970.
            place, ranks: whose heads these are, see the class.
            held: tokens per KV head before the event, mean over heads.
            kept: [L][H] tokens that heads hold after it.
            age: [L][H] mean distance from the event back to kept tokens whose position
                is known, as a share of the position.
            retention: [up to 64] share of the (head, token) pairs of a part of the text
                that are kept, oldest part first.
            first_known: retention below this position is a mean, see `Followed`.
            share: base64 of a byte per token from the first one on, 255 where all heads
                keep it; with `with_text` only.
        """
        size, position = self.positions.block_size, event.position
        num_local, pinned = event.local_tokens(size), len(event.pinned_blocks) * size
        kept = pinned + seen.num_survivors + num_local
        by_token = tokens_kept(seen, position, num_local, pinned)
        record = {
            "kind": "event",
            "at": time.time(),
            "place": self.place,
            "ranks": self.ranks,
            "request": event.request_id,
            "serial": event.serial,
            "ordinal": event.ordinal,
            "policy": event.policy,
            "position": position,
            "prompt": event.prompt_tokens,
            "budget": event.budget,
            "sinks": pinned + event.sinks,
            "pinned": pinned,
            "frontier": event.frontier_blocks * size,
            "held": round(float(pinned + seen.num_held.mean()), 1),
            "kept": kept.reshape(self.shape).tolist(),  # sync-ok: numpy
            "age": _rounded(
                mean_age(seen, position, num_local, pinned).reshape(self.shape)
            ),
            "retention": _rounded(in_bins(by_token)),
            "first_known": seen.first_known,
        }
        if self.with_text:
            share = (by_token[:MOST_TOKENS] * 255).round().astype(np.uint8)
            record["share"] = b64encode(share.tobytes()).decode()
        return record


def tokens_kept(
    seen: Followed, position: int, num_local: int, pinned: int
) -> np.ndarray:
    """Return [position] float64, the share of heads that keep each token.

    Where survivors were not followed, all tokens have the mean.

    Args:
        position: p, tokens computed before it.
        num_local: newest tokens, which all heads keep.
        pinned: first tokens, which all heads keep, too.
    """
    heads, survivors = len(seen.survivors), seen.survivors
    counts = np.bincount(survivors[survivors >= 0], minlength=position)
    share = counts / heads
    share[position - num_local :] = 1
    unknown = seen.num_survivors.sum() - np.count_nonzero(survivors >= 0)
    below = slice(pinned, seen.first_known)
    share[below] = unknown / max(heads * (seen.first_known - pinned), 1)
    share[:pinned] = 1
    return share


def mean_age(seen: Followed, position: int, num_local: int, pinned: int) -> np.ndarray:
    """Return [n] float64, how far back a head looks, from 0 to 1; see `tokens_kept`."""
    is_known = seen.survivors >= 0
    ages = np.where(is_known, position - seen.survivors, 0).sum(1)
    ages += num_local * (num_local + 1) // 2
    ages += pinned * position - pinned * (pinned - 1) // 2
    counts = is_known.sum(1) + num_local + pinned
    return ages / np.maximum(counts, 1) / position


def in_bins(share: np.ndarray) -> np.ndarray:
    """Return NUM_BINS means of [P] shares, oldest first, or the shares if P is less."""
    kept, tokens = kept_by_bin(share, min(NUM_BINS, len(share)), len(share))
    return kept / tokens


def _rounded(values: np.ndarray) -> list[Any]:
    return values.round(3).tolist()  # sync-ok: numpy
