"""The oracles can fail: each of three mistakes in the worker makes them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engine.helpers import Engine, config_of, make_jobs
from support.engine.oracle_replay import Mismatch, check_replay
from support.engine.oracle_selection import Report, check_selection
from support.engine.reference_decoder import ReferenceDecoder
from vllm_kvpolicy.policies.compose import ComposedPolicy
from vllm_kvpolicy.worker.batch import Batch, Choice, Destinations
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.compaction import Compactor
from vllm_kvpolicy.worker.request_table import RequestTable

# Events are not spread: two requests must have theirs together, to be confused.
VALUES = {
    "budget": 110,
    "interval": 56,
    "prefill_interval": 256,
    "spread_events": False,
}
LENGTHS = (150, 150, 300)
Checks = tuple[bool, bool]
POLICIES = ["ams-tova", pytest.param("snapkv", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=POLICIES)
def engine(tiny_model: Path, tmp_path_factory, request) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("mutations")
    values = {"policy": request.param, **VALUES}
    with Engine(tiny_model, values, folder) as engine:
        engine.values = values
        yield engine


JOBS = make_jobs(LENGTHS, 110, seed=3)


def oracles_agree(engine: Engine, decoder: ReferenceDecoder) -> Checks:
    """Return whether the selection and the replay oracle find nothing wrong."""
    run, config = engine.run(JOBS), config_of(engine.values)
    assert len(run.events) >= 5

    def agrees(check: Callable[..., Any], *more: Any) -> bool:
        try:
            for result in run.results.values():
                check(decoder, result, *more)
        except Mismatch:
            return False
        return True

    return agrees(check_selection, config, 32, Report()), agrees(check_replay)


def test_both_oracles_agree_without_a_mutation(engine, decoder) -> None:
    assert oracles_agree(engine, decoder) == (True, True)


def test_windows_that_are_a_token_too_old(engine, decoder, monkeypatch) -> None:
    """Other survivors, which the replay then replays."""
    queries = QueryWindows.queries

    def shifted(self: QueryWindows, *asked: Any) -> torch.Tensor:
        window = queries(self, *asked)
        return torch.cat([window[:, :, :, :1], window[:, :, :, :-1]], dim=3)

    monkeypatch.setattr(QueryWindows, "queries", shifted)
    selection, _ = oracles_agree(engine, decoder)
    assert not selection


def test_two_requests_rows_swapped(engine, decoder, monkeypatch) -> None:
    """Two requests of equal length read each other's survivors."""
    rows = RequestTable.rows
    swaps = []

    def swapped(self: RequestTable, request_ids, num_rows: int) -> np.ndarray:
        result = rows(self, request_ids, num_rows)
        first, second = (*result, self.null_row)[:2]
        dropped = self.dropped_tokens_cpu
        if dropped[first] and dropped[first] == dropped[second]:
            result[:2] = second, first
            swaps.append(num_rows)
        return result

    monkeypatch.setattr(RequestTable, "rows", swapped)
    _, replay = oracles_agree(engine, decoder)
    assert swaps
    assert not replay


def test_one_head_dropped_when_moving(engine, decoder, monkeypatch) -> None:
    """The last head's pages receive the tokens that the first head keeps."""
    move = Compactor._move

    def wrong(self, batch: Batch, choice: Choice, destinations: Destinations) -> None:
        num_heads, size = batch.held.pages.shape[1], batch.held.max_tokens
        heads = destinations.sources.unflatten(1, (num_heads, -1)).clone()
        heads[:, -1] = heads[:, 0] + (num_heads - 1) * size
        move(self, batch, choice, replace(destinations, sources=heads.flatten(1)))

    monkeypatch.setattr(Compactor, "_move", wrong)
    _, replay = oracles_agree(engine, decoder)
    assert not replay


def test_one_head_dropped_when_deciding(engine, decoder, monkeypatch) -> None:
    """The last head keeps its newest tokens, whatever their score."""
    decide = ComposedPolicy.decide

    def wrong(self: ComposedPolicy, inputs, budget: int):
        decision = decide(self, inputs, budget)
        end = inputs.lengths[..., None]
        token = torch.arange(decision.keep.shape[-1])
        newest = (token < end) & (token >= end - budget)
        decision.keep[:, :, -1] = newest[:, :, -1]
        return decision

    monkeypatch.setattr(ComposedPolicy, "decide", wrong)
    selection, replay = oracles_agree(engine, decoder)
    assert not selection
    assert replay  # the server did keep what it recorded
