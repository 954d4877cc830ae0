"""Tests of the language benchmark on an engine with the packaged model."""

import random
from pathlib import Path

import numpy as np
import pytest

import reasoner
from benchmarks.language import losses
from benchmarks.language.engines import Engine, Settings, running
from benchmarks.language.texts import Text
from benchmarks.report import traces

CHECKPOINT = Path(reasoner.__file__).parent / "checkpoint"
BUDGET, INTERVAL, LENGTH = 96, 64, 300
FIRST = losses.first_event(BUDGET, INTERVAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder in which the engine records what events keep."""
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def found(folder) -> dict[tuple[str, int], list[losses.Scored]]:
    """Return losses of two made texts by policy and budget."""
    rng = random.Random(0)
    texts = [
        Text(f"made-{n}", "made", tuple(rng.randrange(10, 90) for _ in range(LENGTH)))
        for n in range(2)
    ]
    settings = Settings(
        model=CHECKPOINT,
        dtype="float32",
        max_model_len=LENGTH + 20,
        at_once=2,
        budgets=(BUDGET, 512),
        intervals=(INTERVAL,),
        trace=folder,
    )
    engine = Engine(("full", "streaming", "tova"), INTERVAL)
    with running(engine, settings) as asker:
        return {
            (policy, budget): losses.measure(asker, policy, budget, texts)
            for policy, budget in [("full", BUDGET), ("tova", 512)]
            + [(policy, BUDGET) for policy in ("tova", "streaming")]
        }


def test_a_budget_that_is_never_reached_gives_the_losses_of_full_kv(found):
    for ours, full in zip(found["tova", 512], found["full", BUDGET], strict=True):
        np.testing.assert_array_equal(ours.losses, full.losses)
        assert ours.held == full.held == 1


@pytest.mark.parametrize("policy", ["tova", "streaming"])
def test_losses_differ_from_the_first_event_on_and_not_before(policy, found):
    for scored, whole in zip(found[policy, BUDGET], found["full", BUDGET], strict=True):
        ours, full = scored.losses, whole.losses
        assert len(ours) == LENGTH - 1
        held = [
            p + 1 - (p // INTERVAL * INTERVAL - BUDGET)
            for p in range(FIRST, LENGTH - 1)
        ]
        share = sum(held) / sum(range(FIRST + 1, LENGTH))
        assert scored.held == pytest.approx(share)
        np.testing.assert_array_equal(ours[:FIRST], full[:FIRST])
        # The query right behind the event no longer sees what it dropped.
        assert ours[FIRST] != full[FIRST]


def test_what_events_keep_is_recorded(found, folder):
    made = traces.read_policies(folder)
    events = sum(place < LENGTH for place in range(FIRST, LENGTH + 1, INTERVAL))
    assert {name: row["events"] for name, row in made.items()} == {
        "streaming": 2 * events,
        "tova": 2 * events,
    }
