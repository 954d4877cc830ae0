"""Policies over an FP8 KV cache: memory, admissions and Quest, and what is kept.

Movers are in test_identity.py, evictions where both oracles are.
Write gates at events and page bounds read rounded keys; DMS and `exact` gates decide
from the numbers before they are stored, and `exact` attention reads rounded ones. Keys
and values have scales. In float32, so that nothing but the cache rounds: stock vLLM on
an AMX machine computes FP8 attention in another order in bfloat16.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from reasoner.problems import generate
from support.cpu import needs_float8
from support.engine.admissions import closed_form, follow_all
from support.engine.dms_decoder import DmsDecoder, say_dms
from support.engine.float8_oracle import (
    SCALES,
    STORED,
    RoundedCache,
    check_storage,
    run_and_see,
    scaled_cache,
)
from support.engine.gated_decoder import NEAR
from support.engine.helpers import BLOCK, Engine, Job, make_jobs, serve
from support.engine.oracle_quest import QuestDecoder
from support.engine.oracle_replay import activations, check_logprobs
from support.engine.reference_decoder import ReferenceDecoder
from support.made_gates import make_gates
from support.tiny_model import make_tiny_model
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, paged_gates_ref

pytestmark = needs_float8
LAYERS, HEADS, DIM, WINDOW, SINKS = 2, 2, 32, 40, 7
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}
KIND = "fp8"
Served = tuple[Any, Any]


def test_the_same_bytes_hold_four_times_the_tokens(tiny_model: Path) -> None:
    """Of a float32 model; tables of policies take their part."""
    found = {}
    values = {"policy": "streaming", "budget": 128, "interval": 40}
    for kind in ("auto", KIND):
        changes = {"kv_cache_memory_bytes": 2 * 2**20, "num_gpu_blocks_override": None}
        changes |= {"kv_cache_dtype": kind, "max_model_len": 512}
        with Engine(tiny_model, values, **changes) as engine:
            found[kind] = engine.num_usable + 1
            run = engine.run(make_jobs((150, 300), 150, seed=3))
            assert run.counters["tokens_dropped"] > 0
    assert 3.9 * found["auto"] <= found[KIND] <= 4 * found["auto"] + 3


# -- admissions ------------------------------------------------------------------------


def run(model: Path, trace: Path, policy: dict[str, Any]) -> Served:
    """Run requests; return their results and what was stored, by name."""
    jobs = make_jobs((40, 170, 300), 130, prompt_logprobs=True)
    changes = {"max_num_batched_tokens": 96, "max_model_len": 832}
    changes["kv_cache_dtype"] = KIND
    values = {**BASE, **policy}
    with scaled_cache(SCALES), Engine(model, values, trace, **changes) as engine:
        check_storage(engine, KIND)
        found, seen = run_and_see(engine, jobs, ReferenceDecoder(model))
    assert found.counters["events"] >= 8
    return found.results, seen


def rounded(decoder: ReferenceDecoder, seen: torch.Tensor) -> Any:
    """Return a decoder after it has been given the server's cache of a request."""
    decoder.cached = RoundedCache(STORED[KIND], seen, SCALES)
    return decoder


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
    policy, flipped = GatedPolicy(tmp_path), 0
    results, seen = run(tiny_model, tmp_path / "trace", policy.named(name))
    decoder = ReferenceDecoder(tiny_model)

    def decide(decoder: ReferenceDecoder, result: Any) -> tuple[torch.Tensor, ...]:
        nonlocal flipped
        gates = policy.values(activations(decoder, result).keys)
        plain = policy.values(decoder.cached.seen[0, :, :, : gates.shape[-1]])
        flipped += int(((gates > 0.5) != (plain > 0.5)).sum())
        return gates <= 0.5, (gates - 0.5).abs() < NEAR

    def decoder_of(result: Any) -> ReferenceDecoder:
        return rounded(decoder, seen[result.job.name])

    total = follow_all(results.values(), decoder_of, SINKS, "+" in name, decide)
    assert min(total["kept"], total["dropped"]) > 200
    assert flipped > 20  # unrounded keys would decide otherwise


def test_dms_decides_from_queries_that_are_not_rounded(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    say_dms(model, dms_window_size=WINDOW, dms_cr=2)
    results, seen = run(model, tmp_path / "trace", {"policy": "dms"})
    decoder = DmsDecoder(model)
    total = follow_all(
        results.values(), lambda result: rounded(decoder, seen[result.job.name]), SINKS
    )
    assert min(total["kept"], total["dropped"]) > 200


def test_exact_attention_reads_rounded_tokens(tiny_model: Path, tmp_path: Path) -> None:
    """By its closed form: the window, the sinks, and what gates let in."""
    gated, decoder = GatedPolicy(tmp_path), ReferenceDecoder(tiny_model)
    policy = gated.named("wgkv", exact=True)
    results, seen = run(tiny_model, tmp_path / "trace", policy)
    for job, result in results.items():
        keys = seen[job][0, :, :, : len(result.all_tokens)].nan_to_num()
        kept = gated.values(keys) > 0.5
        visible = torch.stack([closed_form(each, WINDOW, SINKS) for each in kept])
        check_logprobs(rounded(decoder, seen[job]), result, visible, 0)


@pytest.mark.parametrize(("name", "budget"), [("quest", 160), ("snapkv+quest", 100)])
def test_quest_bounds_rounded_keys(
    tiny_model: Path, tmp_path: Path, name: str, budget: int
) -> None:
    options = {"quest_budget": budget}
    policy = {"policy": name, "budget": 110, "policy_config": options}
    results, seen = run(tiny_model, tmp_path, policy)
    decoder = QuestDecoder(tiny_model, budget, BLOCK)
    for job, result in results.items():
        rounded(decoder, seen[job]).check(result)
    assert decoder.choices > 300


# -- beside a cache of whole numbers ---------------------------------------------------

PACKAGED_MODEL = Path(__file__).parents[2] / "reasoner" / "checkpoint"
NEARLY = ("tova", "snapkv", "ams-tova", "expected", "adakv-snapkv")
AGREEMENT = 0.97


def keep_lists(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """Return by policy what the first event of a prompt keeps, [L, H, positions].

    The prompt is a puzzle with its worked solution; the model is in bfloat16.
    """
    puzzle = generate("path", 90, 0)
    text = f"<bos><user>{puzzle.prompt}<assistant><think>{puzzle.trace}"
    coder = Tokenizer.from_file(str(PACKAGED_MODEL / "tokenizer.json"))
    prompt = coder.encode(text, add_special_tokens=False).ids[:400]
    values = {"budget": 192, "interval": 128, "prefill_interval": 128}
    values |= {"policy": NEARLY[0], "policy_config": {"allow": list(NEARLY)}}
    jobs = [Job(n, prompt, 1, extra_args={"kv_policy": n}) for n in NEARLY]
    changes = {"dtype": "bfloat16", "kv_cache_dtype": kind, "max_model_len": 1024}
    found = {}
    run = serve(PACKAGED_MODEL, values, jobs, folder / kind, **changes)
    for name, result in run.results.items():
        row = result.events[0].selected
        kept = np.zeros((*row.shape[:2], len(prompt) + 1), dtype=bool)
        np.put_along_axis(kept, row, True, axis=-1)  # -1: the last column
        found[name] = kept[..., :-1]
    return found


def test_keep_lists_are_nearly_those_of_a_whole_cache(tmp_path: Path) -> None:
    """Rounding reaches the scores, and by the layers before, the queries."""
    whole, rounded = (keep_lists(kind, tmp_path) for kind in ("auto", KIND))
    for name in NEARLY:
        both = (whole[name] & rounded[name]).sum()
        share = 2 * both / (whole[name].sum() + rounded[name].sum())
        print(f"{name}: {share:.4f} of what is kept is the same")
        assert share >= AGREEMENT
        assert share < 1  # or one of them was not over an FP8 cache
