"""The parts of the benchmark: what each asks, and what it keeps of an answer."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.accuracy.results import Line
from benchmarks.language import agreement, load, losses, tasks, turns
from benchmarks.language.engines import Asker
from benchmarks.language.texts import Encode, Text, spread


class Item(Protocol):
    """What a policy is measured on; output files have a line for each."""

    @property
    def id(self) -> str:
        """Its name, unique within the part."""

    @property
    def kind(self) -> str:
        """What it is averaged with."""

    @property
    def digest(self) -> str:
        """What tells it from another of the same name."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of its longest prompt."""


@dataclass(frozen=True)
class Part:
    """One part of the benchmark.

    Attributes:
        items: (encode, texts, count, kinds) -> what to measure, always the same; kinds
            that are not named may be among it.
        prepare: (asker, items, told) -> the items with what full KV says of them; once
            a run. `told` are lines of full KV in the output file, by id.
        told: item -> what a line of full KV also says, for `prepare` of a later run.
        measure: (asker, policy, budget, items) -> a measurement of each item.
        figures: (measurement, budget, interval) -> figures of an output line.
        names: of the figures that are one number.
        as_served: needs engines that are set up as servers are by default.
        is_crowded: needs a pool that is too small.
    """

    items: Callable[[Encode, Sequence[Text], int, Collection[str]], list[Any]]
    prepare: Callable[[Asker, Sequence[Any], Mapping[str, Line]], list[Any]]
    measure: Callable[[Asker, str, int, Sequence[Any]], list[Any]]
    figures: Callable[[Any, int, int], dict[str, Any]]
    names: tuple[str, ...]
    told: Callable[[Any], dict[str, Any]] = lambda item: {}
    as_served: bool = False
    is_crowded: bool = False


def _texts(
    encode: Encode, texts: Sequence[Text], count: int, kinds: Collection[str]
) -> list[Text]:
    return spread(texts, count)


def _as_they_are(
    asker: Asker, items: Sequence[Any], told: Mapping[str, Line]
) -> list[Any]:
    return list(items)


PARTS = {
    "losses": Part(_texts, _as_they_are, losses.measure, losses.figures, ("loss",)),
    "tasks": Part(
        tasks.chosen, _as_they_are, tasks.measure, tasks.figures, ("right", "loss")
    ),
    "agreement": Part(
        _texts,
        agreement.prepare,
        agreement.measure,
        agreement.figures,
        ("first", "equal", "kl", "top"),
        told=lambda item: {agreement.ANSWERED: item.answer_ids},
    ),
    "turns": Part(
        tasks.chosen,
        _as_they_are,
        turns.measure,
        turns.figures,
        ("first_right", "second_right", "alone_right", "cached"),
        as_served=True,
    ),
    "load": Part(
        load.chosen,
        _as_they_are,
        load.measure,
        load.figures,
        ("right", "loss", "speed"),
        as_served=True,
        is_crowded=True,
    ),
}
"""By name."""
