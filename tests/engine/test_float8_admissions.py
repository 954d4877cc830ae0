"""Admissions and Quest over an FP8 KV cache, against a decoder that rounds.

Write gates at events and page bounds read rounded keys; DMS and `exact` gates decide
from the numbers before they are stored, and `exact` attention reads rounded ones. Keys
and values have scales.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.cpu import needs_float8
from support.engine.admissions import follow_decisions
from support.engine.dms_decoder import DmsDecoder, dropped, say_dms
from support.engine.float8_oracle import (
    STORED,
    Float8Decoder,
    run_and_see,
    scaled_cache,
)
from support.engine.helpers import BLOCK, Engine, make_jobs
from support.engine.oracle_quest import QuestDecoder
from support.engine.oracle_replay import activations, check_replay
from support.engine.reference_decoder import ReferenceDecoder
from support.made_gates import make_gates
from support.tiny_model import make_tiny_model
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, paged_gates_ref

pytestmark = needs_float8
LAYERS, HEADS, DIM, WINDOW, SINKS = 2, 2, 32, 40, 7
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}
KIND, SCALES = "fp8", ((0.5, 2.0), (0.25, 0.5))
GATE_NEAR, LOGIT_NEAR = 1e-4, 2e-2
Served = tuple[Any, Any]


def serve(model: Path, trace: Path, policy: dict[str, Any]) -> Served:
    """Run requests; return their results and what was stored, by name."""
    jobs = make_jobs((40, 170, 300), 130, prompt_logprobs=True)
    limits = {"max_num_batched_tokens": 96, "max_model_len": 832}
    with (
        scaled_cache(SCALES),
        Engine(
            model, {**BASE, **policy}, trace, kv_cache_dtype=KIND, **limits
        ) as engine,
    ):
        pool = engine.runtime.compactor.pool
        assert {view.dtype for view in pool.keys} == {STORED[KIND]}
        run, seen = run_and_see(engine, jobs, ReferenceDecoder(model))
        engine.tell_worker_of_the_last_finish()
        assert engine.num_free == engine.num_usable, "superblocks are lost"
        assert engine.counters()["events"] >= 8
    return run.results, seen


class GatedPolicy:
    """A file of gates and what they say of keys."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gates.safetensors"
        self.gates = make_gates(LAYERS, HEADS, DIM, 6, window=WINDOW, rope_theta=1e4)
        self.gates.save(self.path)

    def named(self, name: str, **options: Any) -> dict[str, Any]:
        gates = {"wgkv_gates": str(self.path), "wgkv_threshold": 0.5}
        return {"policy": name, "budget": 110, "policy_config": gates | options}

    def values(self, keys: torch.Tensor) -> torch.Tensor:
        """Return [L, H, T] gates of keys [L, H, T, D]."""
        place = torch.arange(keys.shape[2]).expand(1, *keys.shape[:3])
        rope = Rope.from_theta(1e4, DIM)
        weights = GateWeights(**self.gates.stacked())
        rows = PagedTokens.from_dense(keys[None]), place, place
        return paged_gates_ref(*rows, rope, weights)[0]


@pytest.mark.parametrize("name", ["wgkv", "wgkv+snapkv"])
def test_gates_at_events_see_rounded_keys(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    policy, has_budget = GatedPolicy(tmp_path), "+" in name
    results, seen = serve(tiny_model, tmp_path / "trace", policy.named(name))
    total: dict[str, int] = {}
    flipped = 0
    for job, result in results.items():
        decoder = Float8Decoder(tiny_model, STORED[KIND], seen[job], SCALES)
        check_replay(decoder, result)
        gates = policy.values(activations(decoder, result).keys)
        plain = policy.values(seen[job][0, :, :, : gates.shape[-1]])
        flipped += int(((gates > 0.5) != (plain > 0.5)).sum())
        near = (gates - 0.5).abs() < GATE_NEAR
        found = follow_decisions(result, gates <= 0.5, near, SINKS, has_budget)
        total = {key: total.get(key, 0) + count for key, count in found.items()}
    assert min(total["kept"], total["dropped"]) > 200
    assert total["near"] < total["kept"] / 100
    assert flipped > 20  # unrounded keys would decide otherwise


class RoundedDmsDecoder(Float8Decoder, DmsDecoder):
    """Borrows a channel of queries, which are not rounded."""

    def __init__(self, folder: Path, seen: torch.Tensor) -> None:
        DmsDecoder.__init__(self, folder)
        self.stored, self.seen, self.scales = STORED[KIND], seen, SCALES


def test_dms_decides_from_queries_that_are_not_rounded(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    say_dms(model, dms_window_size=WINDOW, dms_cr=2)
    results, seen = serve(model, tmp_path / "trace", {"policy": "dms"})
    total: dict[str, int] = {}
    for job, result in results.items():
        decoder = RoundedDmsDecoder(model, seen[job])
        check_replay(decoder, result)
        activations(decoder, result)
        logits = decoder.logits
        margin = torch.full_like(logits, torch.inf)
        margin[..., :-1] = logits[..., 1:].abs()
        near = margin < LOGIT_NEAR
        found = follow_decisions(result, dropped(logits, 1), near, SINKS, False)
        total = {key: total.get(key, 0) + count for key, count in found.items()}
    assert min(total["kept"], total["dropped"]) > 200


def test_exact_attention_reads_rounded_tokens(tiny_model: Path, tmp_path: Path) -> None:
    """By its closed form: the window, the sinks, and what gates let in."""
    gated = GatedPolicy(tmp_path)
    policy = gated.named("wgkv", exact=True)
    results, seen = serve(tiny_model, tmp_path / "trace", policy)
    for job, result in results.items():
        size = len(result.all_tokens)
        decoder = Float8Decoder(tiny_model, STORED[KIND], seen[job], SCALES)
        kept = gated.values(seen[job][0, :, :, :size].nan_to_num()) > 0.5
        place = torch.arange(size)
        age = place[:, None] - place
        kept = (kept | (place < SINKS))[:, :, None]
        visible = (age >= 0) & ((age < WINDOW) | kept)
        logprobs = decoder.forward(result.all_tokens, visible).logits.log_softmax(-1)
        first = len(result.job.prompt) - 1
        given = [*enumerate(result.prompt_logprobs), *enumerate(result.logprobs, first)]
        for place_of, entry in given:
            tokens, server = list(entry), torch.tensor(list(entry.values()))
            assert torch.allclose(logprobs[place_of, tokens], server, atol=1e-3)


class RoundedQuestDecoder(Float8Decoder, QuestDecoder):
    """Scores pages by the bounds of rounded keys."""

    def __init__(self, folder: Path, budget: int, seen: torch.Tensor) -> None:
        QuestDecoder.__init__(self, folder, budget, BLOCK)
        self.stored, self.seen, self.scales = STORED[KIND], seen, SCALES


@pytest.mark.parametrize(("name", "budget"), [("quest", 160), ("snapkv+quest", 100)])
def test_quest_bounds_rounded_keys(
    tiny_model: Path, tmp_path: Path, name: str, budget: int
) -> None:
    options = {"quest_budget": budget}
    policy = {"policy": name, "budget": 110, "policy_config": options}
    results, seen = serve(tiny_model, tmp_path, policy)
    choices = 0
    for job, result in results.items():
        decoder = RoundedQuestDecoder(tiny_model, budget, seen[job])
        decoder.check(result)
        choices += decoder.choices
    assert choices > 300
