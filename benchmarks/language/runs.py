"""Runs what an output file lacks: parts, policies and budgets, engine by engine."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.accuracy.results import Line, check_digests, key_of
from benchmarks.accuracy.servers import FULL
from benchmarks.language.engines import Asker, Engine, Settings, engines_of, running
from benchmarks.language.parts import PARTS
from benchmarks.printing import log


@dataclass
class Work:
    """What a run measures, and what its output file has."""

    items: dict[str, list[Any]]
    lines: list[Line]
    _prepared: dict[str, dict[str, Any]] = field(default_factory=dict)

    def missing(
        self, engine: Engine, budgets: Sequence[int]
    ) -> list[tuple[str, str, int, list[str]]]:
        """Return part, policy, budget and ids of what an engine is still asked for."""
        done = set(map(key_of, self.lines))
        return [
            (part, policy, budget, ids)
            for part, items in self.items.items()
            for budget, policy in product(budgets, engine.policies)
            if (
                ids := [
                    item.id
                    for item in items
                    if key_of(_key(part, engine, policy, budget, item.id)) not in done
                ]
            )
        ]

    def prepared(self, part: str, asker: Asker) -> dict[str, Any]:
        """Return a part's items by id, ready to be measured.

        Raises:
            ValueError: the output file has lines of other items.
        """
        if part not in self._prepared:
            told = {
                line["id"]: line
                for line in self.lines
                if line["task"] == part and line["policy"] == FULL
            }
            ready = PARTS[part].prepare(asker, self.items[part], told)
            check_digests(self.lines, {(part, item.id): item.digest for item in ready})
            self._prepared[part] = {item.id: item for item in ready}
        return self._prepared[part]


def run(
    policies: Sequence[str], settings: Settings, work: Work, out: Path | None
) -> None:
    """Measure what the output file lacks and append it, engine by engine.

    Args:
        policies: `NAME` or `NAME:VARIANT`.
        out: output file; None only says what is missing.
    """
    is_crowded = settings.pool_share is not None
    engines = engines_of(policies, settings.intervals, is_alone=is_crowded)
    missing = {engine: work.missing(engine, settings.budgets) for engine in engines}
    items = sum(len(ids) for asked in missing.values() for *_, ids in asked)
    log(f"{items} texts and problems are missing, of {len(engines)} engines")
    if out is None:
        return
    for engine, asked in missing.items():
        if asked:
            with running(engine, settings) as asker, out.open("a") as file:
                for part, policy, budget, ids in asked:
                    began = time.monotonic()
                    ready = work.prepared(part, asker)
                    for start in range(0, len(ids), settings.at_once):
                        some = [ready[id] for id in ids[start:][: settings.at_once]]
                        for line in measure(asker, part, engine, policy, budget, some):
                            file.write(json.dumps(line) + "\n")
                        file.flush()
                    log(
                        f"{part} {engine.label_of(policy)} {budget}/{engine.interval}: "
                        f"{len(ids)} in {time.monotonic() - began:.0f} s"
                    )


def measure(
    asker: Asker,
    part: str,
    engine: Engine,
    policy: str,
    budget: int,
    items: Sequence[Any],
) -> list[Line]:
    """Return a line of the output file for each item of a part."""
    found = PARTS[part].measure(asker, policy, budget, items)
    return [
        _key(part, engine, policy, budget, item.id)
        | {"kind": item.kind, "digest": item.digest}
        | PARTS[part].figures(measured, budget, engine.interval)
        | (PARTS[part].told(item) if policy == FULL else {})
        for item, measured in zip(items, found, strict=True)
    ]


def _key(part: str, engine: Engine, policy: str, budget: int, name: str) -> Line:
    """Return what makes a line unique, see `results.KEY_FIELDS`."""
    return {
        "policy": engine.label_of(policy) if policy != FULL else FULL,
        "budget": budget,
        "interval": engine.interval,
        "task": part,
        "id": name,
        "sample": 0,
    }
