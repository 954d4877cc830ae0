"""Serving with Quest: what is read is what a plain decoder's own scores choose."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import sweeps
from support.engine import helpers
from support.engine.helpers import BLOCK, OWN, Run, jobs_of
from support.engine.oracle_quest import QuestDecoder
from support.engine.oracle_replay import check_replay
from support.engine.reference_decoder import ReferenceDecoder
from support.made_gates import make_gates

LAYERS, HEADS, DIM, WINDOW = 2, 2, 32, 40
VALUES = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": 7}
VALUES |= {"budget": 110}
TIGHT = {"max_num_batched_tokens": 96, "max_model_len": 512, "foresees": False}
LENGTHS, NUM_TOKENS, READ = (40, 180, 300), 100, 100
NAMES = ["quest", "snapkv+quest", "wgkv+snapkv+quest"]
if sweeps.every_name:
    NAMES += ["ams-tova+quest", "wgkv+quest"]


def serve(
    model: Path,
    folder: Path,
    names: list[str],
    read: int,
    num_blocks: int = 400,
    pin: str | int = "none",
) -> Run:
    """Run a server that offers policies, the first one by default."""
    options: dict[str, Any] = {"quest_budget": read}
    if any("wgkv" in name for name in names):
        path = folder / "gates.safetensors"
        gates = make_gates(LAYERS, HEADS, DIM, 6, window=WINDOW, rope_theta=1e4)
        gates.save(path)
        options |= {"wgkv_gates": str(path), "wgkv_threshold": 0.5}
    allowed = [name for name in names[1:] if name != "none"]
    policy = {"policy": names[0], "allow": allowed, "policy_config": options, **VALUES}
    policy["pin"] = pin
    jobs = jobs_of(names, LENGTHS, NUM_TOKENS, prompt_logprobs=True)
    return helpers.serve(model, policy, jobs, folder / "trace", num_blocks, **TIGHT)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Under preemption, with prompts in chunks, of several requests at once."""
    run = serve(tiny_model, tmp_path_factory.mktemp("quest"), NAMES, READ, 24)
    assert run.preemptions > 0
    return run


@pytest.mark.parametrize("name", NAMES)
def test_queries_read_what_their_scores_choose(
    tiny_model: Path, served: Run, name: str
) -> None:
    decoder = QuestDecoder(tiny_model, READ, BLOCK)
    for length in LENGTHS:
        decoder.check(served.results[f"{name} {length}"])
    print(f"{decoder.unread} pages unread, closest scores {decoder.closest:.1e}")
    assert decoder.choices > 300


def test_pinned_pages_are_chosen_like_others(tiny_model: Path, tmp_path: Path) -> None:
    found = serve(tiny_model, tmp_path, ["snapkv+quest"], READ, pin=100)
    decoder = QuestDecoder(tiny_model, READ, BLOCK)
    for length in LENGTHS:
        result = found.results[f"snapkv+quest {length}"]
        decoder.check(result)
    assert {event.pinned for event in result.events} == {100 // BLOCK * BLOCK}
    assert decoder.choices > 100 and decoder.unread > 100


def test_a_budget_for_everything_changes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Tokens are those of the policy in front, of stock vLLM where there is none."""
    jobs = jobs_of([OWN], LENGTHS, NUM_TOKENS)
    stock = helpers.serve(tiny_model, None, jobs, **TIGHT).tokens
    names = ["quest", "snapkv+quest", "snapkv"]
    found = serve(tiny_model, tmp_path, names, 512)
    for length in LENGTHS:
        assert found.tokens[f"quest {length}"] == stock[f"{OWN} {length}"]
        behind = found.tokens[f"snapkv+quest {length}"]
        assert behind == found.tokens[f"snapkv {length}"]
    assert len(found.events) > 20


def test_a_budget_below_the_local_tokens_reads_those(
    tiny_model: Path, tmp_path: Path
) -> None:
    """On a server that allows other policies, which read all that they keep."""
    names = ["quest", "snapkv+quest", "snapkv", "none", "adakv-snapkv"]
    found = serve(tiny_model, tmp_path, names, 1)
    for name in names:
        decoder = QuestDecoder(tiny_model, 1, BLOCK)
        for length in LENGTHS[1:]:
            result = found.results[f"{name} {length}"]
            assert bool(result.events) == (name != "none")
            if "quest" in name:
                decoder.check(result)
            else:
                check_replay(ReferenceDecoder(tiny_model), result)
        if "quest" in name:
            # Every page, in all heads, of every query behind the first event.
            assert decoder.closest == np.inf and decoder.unread > 300
