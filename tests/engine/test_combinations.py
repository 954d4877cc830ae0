"""Features of vLLM together with each other and with each kind of policy.

The grid of docs/support.md has each kind of policy beside each feature alone. Here rows
switch several features on, so that each pair of kinds and features, on or off, is in
one; all rows run where pytest is given `--every-name` (`make test-all`). A row gives
the tokens and survivors of a server with neither drafts nor a prefix cache, in float32.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs

from support.cpu import needs_float8
from support.engine.helpers import Engine, Job, Run, watch_hits
from support.engine.tensor_parallel import (
    POLICY,
    Heads,
    compare,
    options_with_files,
    write_model,
)
from support.repetition import SPECULATION, repetitive, watch_drafts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import support_grid  # noqa: E402
from support_grid import EXAMPLES, FEATURES, KINDS  # noqa: E402

CACHE, RANKS, FP8, DRAFTS = FACTORS = (
    "prefix caching",
    "tensor parallel",
    "FP8 KV cache (needs AVX-512)",
    "n-gram speculation",
)
ARGUMENTS: dict[str, dict[str, Any]] = {
    CACHE: {"enable_prefix_caching": True},
    RANKS: {"tensor_parallel_size": 2},
    FP8: {"kv_cache_dtype": "fp8"},
    DRAFTS: {"speculative_config": SPECULATION},
}
ELSEWHERE = {
    "chunked prefill": "on in every row",
    "async scheduling": "vLLM switches it off on CPUs",
    "CUDA graphs": "there are none on CPUs",
    "data parallel": "needs a server: tests/serve/test_data_parallel.py",
    "suffix speculation (tests need `arctic-inference`)": (
        "needs that package: tests/engine/test_speculation.py"
    ),
    "LoRA": "needs an adapter: tests/engine/test_lora.py",
    "text of multimodal models": "needs another model: tests/engine/test_text_only.py",
    "MTP and EAGLE": "need another model: tests/engine/test_layers_that_draft.py",
    "layers with a state: Mamba, gated delta nets, short convolutions": (
        "needs another model: tests/engine/test_identity.py"
    ),
}
HEADS = Heads(query=8, kv=4)
LENGTHS = (64, 150, 280)
MAX_TOKENS = 100
FREE = "none"


@dataclass(frozen=True)
class Row:
    """A kind of policy, and the features that are on."""

    kind: str
    on: tuple[str, ...]

    def __str__(self) -> str:
        return " + ".join((self.kind, *self.on))


def row_of(kind: str, *switches: bool) -> Row:
    on = zip(FACTORS, switches, strict=True)
    return Row(kind, tuple(name for name, is_on in on if is_on))


EVERY = [row_of(*each) for each in product(KINDS, *[(False, True)] * len(FACTORS))]
PAIRS = [row_of(*each) for each in AllPairs([KINDS, *[(False, True)] * len(FACTORS)])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the rows that cover all pairs, or every row; ranks only in slow tests."""
    if "row" not in metafunc.fixturenames:
        return
    marks = {FP8: needs_float8, RANKS: pytest.mark.slow}
    every = metafunc.config.getoption("--every-name")
    rows = [
        pytest.param(row, id=str(row), marks=[marks[x] for x in row.on if x in marks])
        for row in (EVERY if every else PAIRS)
    ]
    metafunc.parametrize("row", rows)


def test_every_pair_is_in_a_row() -> None:
    """And every feature that a policy goes together with is a factor or elsewhere."""

    def pairs_of(rows: list[Row]) -> set[tuple[Any, ...]]:
        return {
            pair
            for row in rows
            for pair in combinations(
                [row.kind, *((name, name in row.on) for name in FACTORS)], 2
            )
        }

    assert pairs_of(PAIRS) == pairs_of(EVERY)
    assert len(PAIRS) < len(EVERY) / 5
    served = {
        feature.name
        for feature in FEATURES
        if any(support_grid.cell(kind, feature) != "refused" for kind in KINDS)
    }
    assert served == {*FACTORS, *ELSEWHERE}
    for kind, name in product(KINDS, FACTORS):
        feature = next(each for each in FEATURES if each.name == name)
        assert support_grid.cell(kind, feature) == "tested"


@dataclass
class Served:
    """What a server gave.

    Args:
        run: the requests when they came first.
        again: the same requests once more.
        hits: tokens that they then took from the prefix cache.
        accepted: drafts that were right.
    """

    run: Run
    again: Run
    hits: int
    accepted: int


def jobs_of(policy: str) -> list[Job]:
    prompts = [repetitive(seed, length) for seed, length in enumerate(LENGTHS)]
    asked = [(f"{policy} {n}", prompts[n], policy) for n in range(len(prompts))]
    asked.append((FREE, prompts[1], FREE))
    return [
        Job(name, prompt, MAX_TOKENS, extra_args={"kv_policy": own})
        for name, prompt, own in asked
    ]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Served]:
    """Return what serves a row, once."""
    folder = tmp_path_factory.mktemp("combinations")
    model = write_model(folder / "model", HEADS)

    @cache
    def served(row: Row) -> Served:
        policy = EXAMPLES[row.kind]["policy"]
        trace = folder / f"trace {row}"
        trace.mkdir()
        options = options_with_files([policy], trace, HEADS)
        if "quest" in policy:
            options["quest_budget"] = 64
        values = {**POLICY, "policy": policy}
        values["policy_config"] = options
        arguments = {"max_num_batched_tokens": 160, "max_model_len": 512}
        for name in row.on:
            arguments |= ARGUMENTS[name]
        jobs = jobs_of(policy)
        with Engine(model, values, trace / "events", 160, **arguments) as engine:
            drafts = watch_drafts(engine)
            run = engine.run(jobs)
            hits = watch_hits(engine)
            again = engine.run(jobs)
        return Served(run, again, hits.total(), sum(drafts.accepted.values()))

    return served


def test_together(serve: Callable[[Row], Served], row: Row) -> None:
    plain = Row(row.kind, tuple(name for name in (RANKS, FP8) if name in row.on))
    expected, found = serve(plain), serve(row)
    assert (found.hits > 0) == (CACHE in row.on)
    assert (found.accepted > 0) == (DRAFTS in row.on)
    for run in (found.run, found.again):
        differing = compare(expected.run, run)
        assert not differing.said and not differing.kept, differing
        assert differing.events >= len(LENGTHS)
