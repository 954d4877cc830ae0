"""The plumbing oracle can fail: mistakes in page lists, memory, positions, signals."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from support.engine.helpers import Engine, Job, make_prompt
from support.engine.oracle_plumbing import check_plumbing
from support.engine.oracle_replay import Mismatch
from support.engine.oracle_selection import Report
from support.engine.reference_decoder import ReferenceDecoder
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.worker.batch import HeldPages
from vllm_kvpolicy.worker.captures.token_signals import TokenSignals
from vllm_kvpolicy.worker.compaction import Compactor
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.ragged import RaggedTier

# Of heads of own lengths, of memory, of positions and signals.
RAGGED, REMEMBERS, SIGNALLED = "pyramid-snapkv", "h2o", "epikv"
VALUES = MappingProxyType(
    {
        "policy": RAGGED,
        "allow": [REMEMBERS, SIGNALLED],
        "budget": 80,
        "interval": 40,
        "prefill_interval": 256,
        "recent": 8,
    }
)
BLOCK, PROMPT, MAX_TOKENS = 32, 40, 210


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("mutations")
    with Engine(tiny_model, dict(VALUES), folder, max_model_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> ReferenceDecoder:
    return ReferenceDecoder(tiny_model)


def complaint(engine: Engine, decoder: ReferenceDecoder, name: str) -> str:
    """Return what the oracle says about two requests of a policy; nothing if right."""
    jobs = [
        Job(
            f"r{number}",
            make_prompt(number, PROMPT),
            MAX_TOKENS,
            extra_args={"kv_policy": name},
        )
        for number in range(2)
    ]
    config = KVPolicyConfig.from_dict(VALUES).with_request({"kv_policy": name}, BLOCK)
    assert config is not None
    if config.protects_prompt:
        config = replace(config, budget_tokens=config.budget_tokens + PROMPT)
    results = engine.run(jobs).results.values()
    assert all(len(result.events) >= 3 for result in results)
    try:
        for result in results:
            report = Report()
            options = config.resolved().options
            check_plumbing(decoder, result, config, options, BLOCK, report)
            report.check()
    except Mismatch as mismatch:
        return str(mismatch)
    return ""


@pytest.mark.parametrize("name", [RAGGED, REMEMBERS, SIGNALLED])
def test_it_agrees_without_a_mutation(engine, decoder, name: str) -> None:
    assert complaint(engine, decoder, name) == ""


def test_heads_read_each_others_pages(engine, decoder, monkeypatch) -> None:
    held = RaggedTier.held

    def swapped(self, *given) -> HeldPages:
        right = held(self, *given)
        return replace(right, pages=right.pages.flip(1))

    monkeypatch.setattr(RaggedTier, "held", swapped)
    assert "differ" in complaint(engine, decoder, RAGGED)


def test_heads_get_each_others_number_of_pages(engine, decoder, monkeypatch) -> None:
    quota = RaggedTier.quota

    def swapped(self, batch, keep) -> torch.Tensor:
        return quota(self, batch, keep.flip(1))

    monkeypatch.setattr(RaggedTier, "quota", swapped)
    assert "survivors, expected" in complaint(engine, decoder, RAGGED)


@pytest.mark.parametrize("axis", [1, 2], ids=["head", "token"])
def test_memory_of_another(engine, decoder, monkeypatch, axis: int) -> None:
    """What one head, or one token, remembers goes to its neighbour."""
    read = SurvivorMemory.read
    monkeypatch.setattr(
        SurvivorMemory, "read", lambda *given: read(*given).roll(1, axis + 1)
    )
    assert "selected differ" in complaint(engine, decoder, REMEMBERS)


def test_memory_is_put_down_before_the_slots_have_moved(
    engine, decoder, monkeypatch
) -> None:
    """Values land on the superblocks of the event before."""
    update, late = RequestTable.update, {}
    remember = Compactor._remember

    def early(self, *given) -> None:
        remember(self, *given)
        for given in late.pop(self.requests, []):
            update(self.requests, *given)

    monkeypatch.setattr(
        RequestTable,
        "update",
        lambda self, *given: late.setdefault(self, []).append(given),
    )
    monkeypatch.setattr(Compactor, "_remember", early)
    assert "selected differ" in complaint(engine, decoder, REMEMBERS)


def test_true_positions_are_off_by_one(engine, decoder, monkeypatch) -> None:
    right = Compactor._positions

    def wrong(remembered, lengths, end) -> torch.Tensor:
        return right(remembered + (remembered > 0), lengths, end)

    monkeypatch.setattr(Compactor, "_positions", staticmethod(wrong))
    assert "selected differ" in complaint(engine, decoder, SIGNALLED)


def test_true_positions_are_forgotten(engine, decoder, monkeypatch) -> None:
    """Tokens held count as consecutive, as if nothing had been dropped."""
    right = Compactor._positions

    def wrong(remembered, lengths, end) -> torch.Tensor:
        return right(torch.zeros_like(remembered), lengths, end)

    monkeypatch.setattr(Compactor, "_positions", staticmethod(wrong))
    assert "selected differ" in complaint(engine, decoder, SIGNALLED)


def test_signals_of_the_token_before(engine, decoder, monkeypatch) -> None:
    values = TokenSignals.values

    def shifted(self, rows: torch.Tensor, num_positions: int):
        found = values(self, rows, num_positions)
        return {signal: each.roll(1, -1) for signal, each in found.items()}

    monkeypatch.setattr(TokenSignals, "values", shifted)
    assert "selected differ" in complaint(engine, decoder, SIGNALLED)


def test_signals_of_another_request(engine, decoder, monkeypatch) -> None:
    values = TokenSignals.values
    monkeypatch.setattr(
        TokenSignals,
        "values",
        lambda self, rows, size: values(self, rows.flip(0), size),
    )
    assert "selected differ" in complaint(engine, decoder, SIGNALLED)
