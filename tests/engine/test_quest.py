"""Serving with Quest: what is read is what a plain decoder's own scores choose."""

from pathlib import Path
from typing import Any

import pytest
from helpers import BLOCK, Engine, Run, make_jobs
from made_gates import make_gates
from oracle_quest import QuestDecoder

from vllm_kvpolicy.admission.wgkv_files import save

LAYERS, HEADS, DIM, WINDOW = 2, 2, 32, 40
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": 7}
TIGHT = {"max_num_batched_tokens": 96, "max_model_len": 832}
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
        save(path, gates)
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
