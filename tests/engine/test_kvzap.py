"""Serving with a surrogate of KVzap: what survives is what a plain decoder scores.

Random weights, so that about half of the tokens score below the threshold. Scores next
to it may round either way and are left out.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.engine.admissions import follow_decisions
from support.engine.helpers import Engine, Run, make_jobs
from support.engine.kvzap_decoder import KVzapDecoder
from support.engine.oracle_replay import activations, check_replay
from support.made_surrogates import CENTRE, write_surrogate

LAYERS, HEADS, HIDDEN, WINDOW, SINKS, BUDGET = 2, 2, 64, 40, 7, 110
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}
TIGHT = {"max_num_batched_tokens": 96, "max_model_len": 832, "foresees": False}
BLOCKS = {False: 40, True: 27}  # too few for all at once; with a budget, fewer
LENGTHS = (1, 100, 300, 600, 170)
UNITS = {"linear": None, "mlp": 16}
NEAR = 1e-4


class Served:
    """A run that strains the engine, and how to recompute it."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        name: str = "kvzap",
        kind: str = "mlp",
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        surrogate = write_surrogate(
            folder / "surrogate", LAYERS, HEADS, HIDDEN, UNITS[kind]
        )
        given = {"kvzap_model": str(surrogate), **(options or {})}
        policy = {"policy": name, "policy_config": given, "budget": BUDGET, **BASE}
        limits = {"num_blocks": BLOCKS["+" in name], **TIGHT, **changes}
        jobs = make_jobs(LENGTHS, 150, prompt_logprobs=True)
        with Engine(model, policy, folder / "trace", **limits) as engine:
            self.run: Run = engine.run(jobs)
            engine.tell_worker_of_the_last_finish()
            self.counters = engine.counters()
            assert engine.num_free == engine.num_usable, "superblocks are lost"
        self.results = self.run.results.values()
        self.model = model
        self.tensors = load_file(surrogate / "model.safetensors")

    def decoder(self, hides: bool = False) -> KVzapDecoder:
        """Return a plain decoder with the surrogate."""
        rule = {"threshold": CENTRE, "recent": WINDOW, "sinks": SINKS}
        return KVzapDecoder(self.model, self.tensors, hides, **rule)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("kvzap", "mlp"), ("kvzap+snapkv", "linear"), ("kvzap+ams-tova", "mlp")],
)
def test_survivors_are_those_of_the_scores(
    tiny_model: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Under preemption, prompts in chunks and late answers; replayed exactly."""
    has_budget = "+" in name
    served = Served(tiny_model, tmp_path, name, kind)
    assert served.run.preemptions > 0
    assert served.counters["blocks_returned"] > 0
    decoder, total = served.decoder(), dict[str, int]()
    for result in served.results:
        check_replay(decoder, result)
        activations(decoder, result)
        above = decoder.scores - CENTRE
        seen = follow_decisions(
            result, above < 0, above.abs() < NEAR, SINKS, has_budget
        )
        total = {key: total.get(key, 0) + count for key, count in seen.items()}
    assert min(total["kept"], total["dropped"]) > 500
    assert (total["evicted"] > 100) == has_budget
    assert total["near"] < total["kept"] / 100


def test_a_threshold_below_all_scores_is_stock(
    tiny_model: Path, tmp_path: Path
) -> None:
    served = Served(tiny_model, tmp_path, options={"kvzap_threshold": -1e6})
    with Engine(tiny_model, num_blocks=BLOCKS[False], **TIGHT) as engine:
        stock = engine.run(make_jobs(LENGTHS, 150))
    assert served.counters["events"] > 20
    assert served.counters["tokens_dropped"] == 0
    assert served.run.tokens == stock.tokens


def test_a_threshold_above_all_scores_leaves_the_window(
    tiny_model: Path, tmp_path: Path
) -> None:
    served = Served(tiny_model, tmp_path, options={"kvzap_threshold": 1e6})
    for result in served.results:
        check_replay(served.decoder(), result)
        for event in result.events:
            # One page, of sinks and fillers.
            kept = (torch.tensor(event.survivors) >= 0).sum(-1)
            assert kept.unique().tolist() == [32]


@pytest.mark.slow
def test_chunks_and_compiled_models_score_alike(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The hook is traced into the compiled graph."""
    found = []
    for tokens, is_eager in ((64, True), (101, True), (832, False)):
        changes = {"max_num_batched_tokens": tokens, "enforce_eager": is_eager}
        folder = tmp_path / str(tokens)
        served = Served(tiny_model, folder, num_blocks=400, **changes)
        assert served.counters["tokens_dropped"] > 300
        found.append(
            {
                name: (
                    result.tokens,
                    [event.survivors.tolist() for event in result.events],
                )
                for name, result in served.run.results.items()
            }
        )
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["kvzap", "kvzap+snapkv"])
def test_exact_hides_tokens_that_leave_the_window(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """A plain decoder that hides tokens by its own scores gives the same numbers."""
    served = Served(tiny_model, tmp_path, name, options={"exact": True})
    assert served.counters["tokens_dropped"] > 500
    for result in served.results:
        if name == "kvzap":
            result.passes.clear()  # what the server recorded plays no part
        check_replay(served.decoder(hides=True), result)
