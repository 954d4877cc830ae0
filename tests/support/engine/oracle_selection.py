"""The selection oracle: what a server should have kept, from dense keys and queries.

Replays the survivors that the server recorded, and at every event recomputes usage,
score and selection in float64, one head at a time, with no code of the policies but
`policies.allocators.ams.select`, which has golden tests of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from support.engine.oracle_replay import Mismatch, activations
from support.engine.passes import Cut
from support.engine.reference_decoder import Activations, ReferenceDecoder
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import PRESSURE
from vllm_kvpolicy.events import EventPlan, request_phase
from vllm_kvpolicy.hints import NO_HINTS, Hints, Ranges
from vllm_kvpolicy.policies.allocators.ams import AMSConfig, select

GAP = 1e-5
MAX_SHARE = 1e-3
POOL = 5


@dataclass
class Report:
    """Outcome of the oracle.

    Args:
        decisions: rows that were compared: (event, layer, KV head).
        near_ties: one line for each row that differs where the reference's own scores
            are closer than GAP at the cut.
    """

    decisions: int = 0
    near_ties: list[str] = field(default_factory=list)

    def compare(
        self,
        where: str,
        held: np.ndarray,
        score: np.ndarray,
        expected: tuple[np.ndarray, np.ndarray],
        got: tuple[np.ndarray, np.ndarray],
        tolerance: float = GAP,
    ) -> None:
        """Compare what one head selected, and what survived of it, as indices.

        Args:
            where: event, layer and head.
            held: [T] true positions of the tokens that the head held.
            score: [T] of them, by the reference.
            expected: indices that it selects, and those that survive.
            got: the server's.
            tolerance: a smaller difference of scores at the cut is a near tie.

        Raises:
            Mismatch: they differ where the reference leaves no doubt.
        """
        self.decisions += 1
        names = "selected", "survivors"
        for name, wanted, found in zip(names, expected, got, strict=True):
            if np.array_equal(np.sort(wanted), found):
                continue
            gap = cut_gap(score, wanted, found)
            line = f"{where}: {name} differ, gap {gap:.2e}"
            if not gap < tolerance:
                raise Mismatch(f"{line}: expected {held[wanted]}, got {held[found]}")
            self.near_ties.append(line)
            break

    def check(self) -> None:
        """Raise Mismatch where near ties are too many to be chance: one may be.

        Of 236 decisions a share of 0.1 % has one by chance in a run of five.
        """
        if len(self.near_ties) > max(1, MAX_SHARE * self.decisions):
            raise Mismatch(
                f"{len(self.near_ties)} of {self.decisions} decisions differ at near "
                f"ties, allowed {MAX_SHARE:.1%}: {self.near_ties[:5]}"
            )


@dataclass(frozen=True)
class Row:
    """What one head of one layer holds at an event, in time order.

    Args:
        held: [T] true positions.
        mean: [Hq per KV head, T] float64, window usage.
        last: the same for the newest query alone.
    """

    held: np.ndarray
    mean: np.ndarray
    last: np.ndarray


@dataclass
class Selector:
    """Selects as a policy should, for one request.

    Args:
        config: the engine's policy, with the request's own knobs.
        decoder: gives the softmax scale and the shape of the model.
        first: tokens that are pinned, in whole superblocks.
        hints: what stays and what goes first, as far as the budget has room.
        credit: EMA credit per (layer, head), of the tokens after the last event.
    """

    config: KVPolicyConfig
    decoder: ReferenceDecoder
    first: int = 0
    hints: Hints = NO_HINTS
    credit: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    @property
    def allocator(self) -> str:
        """The first word of the policy's name."""
        return self.config.policy.rpartition("-")[0]

    @property
    def scorer(self) -> str:
        """The last word of the policy's name."""
        return self.config.policy.rpartition("-")[2]

    @property
    def window(self) -> int:
        """Queries that the policy looks at."""
        return self.config.resolved().window_tokens or 1

    def rows(self, seen: Activations, event: Any, previous: Any) -> list[list[Row]]:
        """Measure the window's attention of every (layer, KV head)."""
        layers = []
        for layer in range(self.decoder.num_layers):
            heads = []
            for head in range(self.decoder.num_heads):
                held = np.arange(self.first, event.position)
                if previous is not None:
                    old = previous.survivors_of(layer, head)
                    held = np.r_[old, np.arange(previous.frontier, event.position)]
                heads.append(self._measure(seen, layer, head, held, event.position))
            layers.append(heads)
        return layers

    def _measure(
        self, seen: Activations, layer: int, head: int, held: np.ndarray, end: int
    ) -> Row:
        group = self.decoder.num_q_heads // self.decoder.num_heads
        keys = seen.keys[layer, head].numpy().astype(np.float64)[held]
        probs = np.zeros((group, self.window, len(held)))
        # Logits of learned sinks, where the model has any.
        none = np.full((self.decoder.num_layers, self.decoder.num_q_heads), -np.inf)
        sinks = getattr(self.decoder, "sinks", none)
        for member in range(group):
            queries = seen.queries[layer, head * group + member].numpy()
            for step in range(self.window):
                position = end - self.window + step
                logits = keys @ queries[position].astype(np.float64)
                logits = np.where(held > position, -np.inf, logits)
                most = logits.max() * self.decoder.scale
                weight = np.exp(logits * self.decoder.scale - most)
                beside = np.exp(sinks[layer, head * group + member] - most)
                probs[member, step] = weight / (weight.sum() + beside)
        return Row(held, probs.mean(1), probs[:, -1])

    def score(self, rows: list[Row], head: int) -> np.ndarray:
        """Score the tokens of one head, higher is kept sooner.

        TOVA averages query heads index by index, as its published code does; where the
        heads of a layer hold different tokens, an index names different tokens.
        """
        row = rows[head]
        if self.scorer == "streaming":
            return np.arange(len(row.held), dtype=np.float64)
        if self.scorer == "tova":
            score = np.concatenate([other.last for other in rows]).mean(0)
            score[-1] = score.max()
            return score
        return self.pooled(row)

    def pooled(self, row: Row) -> np.ndarray:
        """Usage of a KV head, smoothed; the window's own tokens get the maximum."""
        num_older = len(row.held) - self.window
        older = np.zeros(num_older + 2 * (POOL // 2))
        older[POOL // 2 : POOL // 2 + num_older] = row.mean.mean(0)[:num_older]
        smooth = [
            older[start : start + POOL].sum() / POOL for start in range(num_older)
        ]
        return np.r_[smooth, np.full(self.window, max(smooth))]

    def choose(
        self, row: Row, score: np.ndarray, event: Any, layer: int, head: int
    ) -> np.ndarray:
        """Return the indices of the K tokens that should stay, ascending."""
        num_sinks = self.config.sink_tokens
        local = event.position - event.frontier
        if self.allocator == "":
            is_kept = inside(row.held, self.hints.keep)
            is_kept[:num_sinks] = is_kept[len(score) - local :] = True
            chosen = fill(is_kept, score, event.budget)
            return chosen[is_kept[chosen] | (score[chosen] > -np.inf)]
        config = AMSConfig(
            **self.config.resolved().options, sinks=num_sinks, recent=local
        )
        usage = self.pooled(row)
        old = self.credit.get((layer, head))
        choice = select(
            torch.tensor(usage)[None],
            torch.tensor(score)[None],
            event.budget,
            config,
            None if old is None else torch.tensor(old)[None],
        )
        mass = (usage + 1e-12) / (usage + 1e-12).sum()
        before = np.zeros(len(mass))
        if old is not None:
            before[: len(old)] = old
        decay = config.ema_decay
        self.credit[layer, head] = decay * before + (1 - decay) * mass
        return choice.keep[0].numpy()

    def keep_credit(self, layer: int, head: int, indices: np.ndarray) -> None:
        """Carry the credit of the tokens that the server kept to the next event."""
        if (layer, head) in self.credit:
            self.credit[layer, head] = self.credit[layer, head][indices]


def inside(held: np.ndarray, ranges: Ranges) -> np.ndarray:
    """Return [T] bool, which positions lie in a range."""
    return np.array([any(f <= p < e for f, e in ranges) for p in held], dtype=bool)


def fill(is_kept: np.ndarray, score: np.ndarray, count: int) -> np.ndarray:
    """Add the best tokens, the later of equal ones first; return `count` indices."""
    order = sorted(range(len(score)), key=lambda index: (-score[index], -index))
    chosen = set(np.flatnonzero(is_kept).tolist())
    for index in order:
        if len(chosen) >= count:
            break
        chosen.add(index)
    return np.array(sorted(chosen))


def cut_gap(score: np.ndarray, expected: Iterable[int], got: Iterable[int]) -> float:
    """Return how far apart the reference's scores of the exchanged tokens are."""
    missing = sorted(set(expected) - set(got))
    surplus = sorted(set(got) - set(expected))
    if len(missing) != len(surplus):
        return np.inf
    return float(np.abs(score[missing].max() - score[surplus].min()))


def check_selection(
    decoder: ReferenceDecoder,
    result: Any,
    config: KVPolicyConfig,
    block_size: int,
    report: Report,
) -> None:
    """Compare every decision of a request with the reference.

    Raises:
        Mismatch: a decision differs where the reference leaves no doubt.
    """
    check_record(result, config, block_size)
    pinned = config.pinned_tokens(len(result.job.prompt))
    first = pinned // block_size * block_size  # behind it tokens are chosen
    sinks = max(max(config.sink_tokens, pinned) - first, 0)
    seen = activations(decoder, result)
    hints = config.hints_of(len(result.job.prompt), block_size)
    selector = Selector(replace(config, sink_tokens=sinks), decoder, first, hints)
    previous = None
    for event in result.events:
        rows = selector.rows(seen, event, previous)
        for layer, heads in enumerate(rows):
            for head, row in enumerate(heads):
                score = selector.score(heads, head)
                score[inside(row.held, hints.drop_first)] = -np.inf
                kept = selector.choose(row, score, event, layer, head)
                where = f"{result.job.name} p={event.position} l={layer} h={head}"
                held = compare_row(row, score, kept, event, layer, head, where, report)
                selector.keep_credit(layer, head, held)
        previous = event


def compare_row(
    row: Row,
    score: np.ndarray,
    kept: np.ndarray,
    event: Any,
    layer: int,
    head: int,
    where: str,
    report: Report,
) -> np.ndarray:
    """Compare one head's selection and survivors; return the indices it holds."""
    held, survivors = row.held, event.survivors_of(layer, head)
    local = np.arange(event.frontier, event.position)
    holds = np.searchsorted(held, np.r_[survivors, local])
    is_kept = np.zeros(len(score), dtype=bool)
    is_kept[kept] = True
    expected = kept, fill(is_kept, score, len(holds))
    got = np.searchsorted(held, event.selected_of(layer, head)), holds
    report.compare(where, held, score, expected, got)
    return holds


def check_record(result: Any, config: KVPolicyConfig, block_size: int) -> None:
    """Compare positions, budgets and frontiers with the record of events.

    With `always` that follows from the request. With `pressure` it is what the
    scheduler told the worker, which may be anything but a budget below the floor.

    Raises:
        Mismatch: an event is missing, is somewhere else, or leaves something else.
    """
    pinned = config.pinned_tokens(len(result.job.prompt))
    floor = config.budget_tokens + pinned % block_size
    record = planned(result, config, block_size)
    if config.events == PRESSURE:
        record = result.record[-1]
    got = [(event.position, event.budget) for event in result.events]
    if got != record or any(budget < floor for _, budget in record):
        raise Mismatch(
            f"{result.job.name}: events {got}, expected {record}, none below {floor}"
        )
    for event in result.events:
        frontier = (event.position - config.recent_tokens) // block_size * block_size
        if event.frontier != frontier:
            raise Mismatch(f"{result.job.name}: frontier {event.frontier}")


def planned(result: Any, config: KVPolicyConfig, block_size: int) -> list[Cut]:
    """Return the events that a request has with `always`."""
    prompt = result.job.prompt
    pinned = config.pinned_tokens(len(prompt))
    plan = EventPlan(
        len(prompt),
        config.budget_tokens + pinned,
        config.interval_tokens,
        config.prefill_step(block_size),
        request_phase(prompt) if config.spread_events else 0,
        config.resolved().window_tokens,
    )
    # The newest token is never computed, so no event comes before it.
    before = plan.positions_up_to(len(result.all_tokens) - 1)
    budget = config.budget_tokens + pinned % block_size
    return [(position, budget) for position in before]
