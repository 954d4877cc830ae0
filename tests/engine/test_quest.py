"""Serving with Quest: what is read is what a plain decoder's own scores choose."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine.helpers import BLOCK, Engine, Run, make_jobs
from support.engine.oracle_quest import QuestDecoder
from support.engine.oracle_replay import check_replay
from support.engine.reference_decoder import ReferenceDecoder
from support.made_gates import make_gates

LAYERS, HEADS, DIM, WINDOW = 2, 2, 32, 40
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": 7}
TIGHT = {"max_num_batched_tokens": 96, "max_model_len": 832, "foresees": False}
LENGTHS = (40, 100, 300, 600, 170)
TOKENS = 150
# Tokens that a step reads, and superblocks: too few for all requests at once.
CASES = {
    "quest": (160, 40),
    "snapkv+quest": (100, 22),
    "ams-tova+quest": (100, 22),
    "wgkv+quest": (150, 40),
    "wgkv+snapkv+quest": (100, 27),
}


def policy_of(name: str, folder: Path, budget: int, **fields: Any) -> dict[str, Any]:
    """Return the plain form of a policy that reads `budget` tokens."""
    options: dict[str, Any] = {"quest_budget": budget}
    if "wgkv" in name:
        path = folder / "gates.safetensors"
        gates = make_gates(LAYERS, HEADS, DIM, 6, window=WINDOW, rope_theta=1e4)
        gates.save(path)
        options |= {"wgkv_gates": str(path), "wgkv_threshold": 0.5}
    if "quest" not in name:
        del options["quest_budget"]
    return {"policy": name, "policy_config": options, "budget": 110, **BASE, **fields}


def serve(model: Path, folder: Path, name: str, budget: int, blocks: int = 400) -> Run:
    """Run the requests of `LENGTHS`, and record events."""
    policy = policy_of(name, folder, budget)
    jobs = make_jobs(LENGTHS, TOKENS, prompt_logprobs=True)
    with Engine(model, policy, folder / f"{name} {budget}", blocks, **TIGHT) as engine:
        run = engine.run(jobs)
        engine.tell_worker_of_the_last_finish()
        assert engine.num_free == engine.num_usable, "superblocks are lost"
    return run


@pytest.mark.parametrize("name", CASES)
def test_queries_read_what_their_scores_choose(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Under preemption, with prompts in chunks, of several requests at once."""
    budget, blocks = CASES[name]
    run = serve(tiny_model, tmp_path, name, budget, blocks)
    decoder = QuestDecoder(tiny_model, budget, BLOCK)
    worst = max(decoder.check(result) for result in run.results.values())
    print(
        f"{name}: largest difference {worst:.1e}, {decoder.choices} choices, "
        f"{decoder.unread} pages unread, closest scores {decoder.closest:.1e}, "
        f"{run.preemptions} preemptions"
    )
    assert decoder.choices > 300 and run.preemptions > 0


def test_a_budget_for_everything_changes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Tokens are those of the policy in front, of stock vLLM where there is none."""
    with Engine(tiny_model, num_blocks=40, **TIGHT) as engine:
        stock = engine.run(make_jobs(LENGTHS, TOKENS)).tokens
    for name, plain in (("quest", stock), ("snapkv+quest", None)):
        found = serve(tiny_model, tmp_path, name, 832, 40)
        wanted = plain or serve(tiny_model, tmp_path, "snapkv", 832, 40).tokens
        assert found.tokens == wanted
        assert sum(len(result.events) for result in found.results.values()) > 20


def test_a_budget_below_the_local_tokens_reads_those(
    tiny_model: Path, tmp_path: Path
) -> None:
    """On a server that allows other policies, which read all that they keep."""
    names = ("quest", "snapkv+quest", "snapkv", "none", "adakv-snapkv")
    policy = policy_of("quest", tmp_path, 1, allow=list(names[1:3]) + ["adakv-snapkv"])
    jobs = [
        replace(job, extra_args={"kv_policy": name})
        for job, name in zip(
            make_jobs((170, 300, 180, 90, 200), 90), names, strict=True
        )
    ]
    trace = tmp_path / "trace"
    with Engine(tiny_model, policy, trace, **TIGHT) as engine:
        results = engine.run(jobs).results
    for job, name in zip(jobs, names, strict=True):
        result = results[job.name]
        assert bool(result.events) == (name != "none")
        if "quest" in name:
            decoder = QuestDecoder(tiny_model, 1, BLOCK)
            decoder.check(result)
            # Every page, in all heads, of every query behind the first event.
            assert decoder.closest == np.inf and decoder.unread > 300
        else:
            check_replay(ReferenceDecoder(tiny_model), result)
